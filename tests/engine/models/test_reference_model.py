"""The built-in GGUF, read by our loader, against the weights that the greedy reference was computed with."""

import hashlib
import json
from pathlib import Path

from tests.support.reference_model import reference_folder

DATA = Path(__file__).parents[2] / "data" / "smol135m-greedy.json"


def test_the_ggufs_values_in_bfloat16_are_the_reference_weights_byte_for_byte() -> None:
    with (reference_folder() / "model.safetensors").open("rb") as file:
        made = hashlib.file_digest(file, "sha256").hexdigest()
    assert made == json.loads(DATA.read_text())["safetensors_sha256"]
