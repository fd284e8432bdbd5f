"""The run files of the documentation's recipes are ones that `neap train` takes."""

import re

import pytest
from build_tree import ROOT

HERE = ["--model.path=model", "--data.path=text.txt", "--device.type=cpu", "--train.sequence=32", "--dry-run"]
BASE = {"model": "path: model", "data": "path: text.txt"}


@pytest.mark.parametrize("page", ["fine-tune", "ranks"])
def test_a_run_file_of_a_recipe(workspace, page):
    blocks = re.findall(
        r"^```yaml\n(.*?)^```", (ROOT / "docs" / "recipes" / f"{page}.md").read_text(), re.DOTALL | re.M
    )
    assert blocks
    for block in blocks:
        missing = "".join(f"{section}:\n  {key}\n" for section, key in BASE.items() if f"{section}:\n" not in block)
        (workspace.path / "recipe.yaml").write_text(missing + block)
        result = workspace.run("train", "recipe.yaml", *HERE)
        assert result.code == 0, result.err


def test_settings_that_recipes_name_in_passing(workspace):
    pages = "".join(path.read_text() for path in sorted((ROOT / "docs" / "recipes").glob("*.md")))
    settings = set(re.findall(r"`((?:offload|recompute|train|parallel|checkpoint)\.\w+): (\w+)`", pages))
    settings.remove(("recompute.mode", "selective"))  # which the page gives its modules in the same line
    assert len(settings) >= 5
    for key, value in settings:
        result = workspace.train(f"--{key}={value}", "--device.type=cpu", "--dry-run")
        assert result.code == 0, result.err
