"""Reports: what a capture found out about a program, in words, numbers and pictures.

    Captured -> collect -> Content -> text, terminal, html (folding, picture), dump, JSON

Read in this order: `content` (what a report says), `places` and `objects` (how it names things),
`collect`, the forms, `report`, `explaining`. Nothing below this layer knows of it. What a package
imports, importing any part of it costs: this one imports nothing, for `environment` has to work
where torch does not.
"""
