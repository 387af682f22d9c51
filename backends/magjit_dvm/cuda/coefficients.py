"""Coefficients of ``csrc/functions.inc`` that the GPU's functions use; a test compares them.

Constant term first, as C++ writes them.
"""

from __future__ import annotations

__all__ = ["COEFFICIENTS"]

_TEXT = """
expm1: 0x1.p-1 0x1.555556p-3 0x1.5554eep-5 0x1.110fdep-7 0x1.6d45d4p-10 0x1.a2987cp-13
log: 0x1.55554ap-2 -0x1.000224p-2 0x1.99a5aep-3 -0x1.5477a4p-3 0x1.226cc2p-3 -0x1.0ce786p-3
  0x1.07d908p-3 -0x1.41d614p-4
tanh: -0x1.55554ap-2 0x1.110cdap-3 -0x1.b918e4p-5 0x1.58a86p-6 -0x1.97888p-8
erf: 0x1.06eba8p-3 -0x1.81274p-2 0x1.ce2d52p-4 -0x1.b7fec4p-6 0x1.542fecp-8 -0x1.a5197ap-11
  0x1.4c5cb4p-14
erfc: -0x1.b1370ap+1 -0x1.c12064p+1 -0x1.c907fcp-1 -0x1.a710e4p-6 0x1.893ebcp-8 -0x1.4aa54p-10
  0x1.da877ep-13 -0x1.c0e266p-16
sin: -0x1.555555493d4e3p-3 0x1.11110cbd14a0ep-7 -0x1.a017fc8266b9bp-13 0x1.7174aac277fbbp-19
  -0x1.9ac07a38b5f1ep-26
tan_sin: -0x1.5555554cae54ap-3 0x1.111108907336ap-7 -0x1.a00f9a9fd6d06p-13 0x1.6cd7e6dada2bfp-19
tan_cos: -0x1.ffffffd0819a4p-2 0x1.55553dfe820c2p-5 -0x1.6c08799f381b1p-10 0x1.9933652bfc7d8p-16
atan: -0x1.55554p-2 0x1.99926ap-3 -0x1.24267cp-3 0x1.c0cd9cp-4 -0x1.58ce66p-4 0x1.dcdf58p-5
  -0x1.0180acp-5 0x1.6a2bb4p-7 -0x1.de4d4p-10
asin: 0x1.5555ccp-3 0x1.3301p-4 0x1.74925p-5 0x1.8b71d4p-6 0x1.59fdeap-5
sinh: 0x1.555556p-3 0x1.1110ecp-7 0x1.a01ad8p-13 0x1.76aa52p-19
pow_log: 0x1.5555555555595p-1 0x1.999999997eda2p-2 0x1.24924942dde43p-2 0x1.c71c514097532p-3
  0x1.746669e496287p-3 0x1.399d37168366p-3 0x1.2f34aeb7ae461p-3
pow_exp: 0x1.62e42fef84c49p-1 0x1.ebfbdff81108ep-3 0x1.c6b08dd6f403dp-5 0x1.3b2ab73381a19p-7
  0x1.5d8745ae4aba6p-10 0x1.43087e1641998p-13 0x1.00dc46d8bae99p-16 0x1.6401169d1519dp-20
"""


def _parsed() -> dict[str, tuple[float, ...]]:
    found: dict[str, tuple[float, ...]] = {}
    name = ""
    for line in _TEXT.strip().splitlines():
        head, colon, rest = line.partition(":")
        name, numbers = (head, rest) if colon else (name, line)
        values = tuple(float.fromhex(one) for one in numbers.split())
        found[name] = found.get(name, ()) + values
    return found


COEFFICIENTS = _parsed()
"""By name of the polynomial."""
