"""Each fault of `make mutants` still fits its file, and names a test that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutants import Fault, read_faults

FAULTS = read_faults()
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault_fits_its_file_and_names_a_test(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text().count(fault.old) == 1
    assert fault.new != fault.old
    path, _, name = fault.test.partition("::")
    function = re.escape(name.partition("[")[0])
    assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text(), re.MULTILINE)


def test_faults_have_names_of_their_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
