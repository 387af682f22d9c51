"""The encoder's code lies in one piece: between two operators it is fetched as one.

Without that an encoding takes twice its time, and nothing else would tell.
"""

import re
import struct
from pathlib import Path

import pytest

import magjit_dvm
from magjit_dvm import _vm

HEADER = Path(magjit_dvm.__file__).parent / "csrc" / "encoder.h"


def sections(image: bytes) -> dict[str, int]:
    """Sizes in bytes of a 64-bit ELF image's sections."""
    (table,) = struct.unpack_from("<Q", image, 40)
    entry, count, names = struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * entry) for i in range(count)]
    strings = headers[names][4]
    found = {}
    for name, _, _, _, _, size in headers:
        start = strings + name
        found[image[start : image.index(b"\0", start)].decode()] = size
    return found


def test_the_section_holds_the_encoder():
    size = sections(Path(_vm.__file__).read_bytes())["magjit_encoder"]
    assert 12 << 10 < size < 40 << 10


@pytest.mark.skipif(not HEADER.exists(), reason="an installed package has no sources")
def test_each_function_of_the_encoder_is_in_the_section():
    text = HEADER.read_text()
    body = text[text.index("struct Encoder {") :]
    declared = re.findall(r"^    (?!return)[\w ]+\*?\*?\b\w+\([^;{}]*\)(?: const)?;$", body, re.M)
    assert len(declared) > 30
    assert [line for line in declared if not line.lstrip().startswith("ENCODER")] == []
