"""Comments and YAML."""

import yaml

from autofit.export.formats import comment, yaml_file


def test_the_head_is_a_comment_and_floats_are_numbers_to_any_parser() -> None:
    text = yaml_file(("one", "", "two"), {"rate": 2e-5, "zero": 0.0, "none": None})
    assert text.startswith("# one\n#\n# two\n\n")
    assert "rate: 2.0e-05" in text
    assert yaml.safe_load(text) == {"rate": 2e-5, "zero": 0.0, "none": None}
    assert comment(()) == ""
