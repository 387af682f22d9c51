"""Coverage of programs: how many a compiler takes whole, measured alike for all compilers.

    corpus file -> cases -> protocol (eager, compilers) -> SQLite -> figures -> report

Read in this order: `corpus` (files and cases), `stubs`, `shims` and `helpers` (the environment in
which third-party code runs), `values` (comparison), `dynamic`, `operators`, `compilers`,
`protocol` (the steps of one case), `worker` (one file in a process), `scheduler` (all files),
`store`, `figures`, `causes`, `report`, `plots`, `page`, `cli`.
"""
