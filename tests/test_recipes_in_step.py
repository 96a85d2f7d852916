"""The recipes stand alone, so they share text, and only this file keeps it the same in all of them.

A function, class or constant whose name stands at the top level of two recipes is the same text in both,
comments and decorators included. Nobody has to register anything: what may differ stands in MAY_DIFFER.

    python tests/test_recipes_in_step.py --fix     carry the text of ddp_resnet.py to the other recipes
"""

import ast
import difflib
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
FIRST = "ddp_resnet.py"

MAY_DIFFER = {
    "train": "the strategy itself",
    "snapshot": "where no process has the whole state, it is gathered",
}
# Changed lines against ddp_resnet.py, docstring included. A number that grows wants a reason in the same commit.
CHANGED_LINES = {"dp_resnet.py": 138, "fsdp_resnet.py": 152, "mp_resnet.py": 215, "pp_resnet.py": 381}


def blocks(text):
    """{name: (first line, line after the last)} of what the top level defines, from the comment above it."""
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))]) - 1
        while first and lines[first - 1].startswith("#"):
            first -= 1
        for name in [node.name] if hasattr(node, "name") else names:
            found[name] = first, node.end_lineno
    return found


def drift(texts, fix=None, may_differ=MAY_DIFFER):
    """[(recipe, name)] whose text is not that of the first recipe that has the name; fix(recipe, text) mends it."""
    model, wrong = {}, []
    for recipe in sorted(texts, key=lambda name: (name != FIRST, name)):
        lines = texts[recipe].splitlines()
        for name, (first, last) in reversed(blocks(texts[recipe]).items()):
            own = lines[first:last]
            if model.setdefault(name, own) != own and name not in may_differ:
                wrong.append((recipe, name))
                lines[first:last] = model[name]
        if fix and lines != texts[recipe].splitlines():
            fix(recipe, "\n".join(lines) + "\n")
    return wrong


def changed_lines(text, other):
    diff = difflib.unified_diff(text.splitlines(), other.splitlines(), n=0, lineterm="")
    return sum(line[:1] in "+-" for line in list(diff)[2:])


def read(folder):
    return {path.name: path.read_text() for path in folder.glob("*_resnet.py")}


def test_shared_text_is_the_same():
    assert not drift(read(RECIPES)), "mend ddp_resnet.py, then: python tests/test_recipes_in_step.py --fix"


def test_differences_are_counted():
    texts = read(RECIPES)
    counted = {name: changed_lines(texts[FIRST], text) for name, text in texts.items() if name != FIRST}
    assert counted == CHANGED_LINES


def test_what_may_differ_does():
    texts = read(RECIPES)
    assert len(texts) == 1 or MAY_DIFFER.keys() <= {name for _, name in drift(texts, may_differ=())}


DDP = '''"""One."""

LIMIT = 3


# What it adds.
@cached
def add(a, b):
    return a + b  # a sum


def train():
    pass
'''


@pytest.mark.parametrize(
    "right, wrong, name",
    [
        ("a sum", "a difference", "add"),
        ("@cached", "@stored", "add"),
        ("@cached\n", "", "add"),
        ("# What it adds.", "# What it takes.", "add"),
        ("LIMIT = 3", "LIMIT = 4", "LIMIT"),
    ],
)
def test_the_check_finds_and_mends(tmp_path, right, wrong, name):
    other = DDP.replace("One", "Two").replace("pass", "return 1") + "\n\ndef extra():\n    pass\n"
    broken = other.replace(right, wrong)
    assert broken != other
    assert not drift({FIRST: DDP, "fsdp_resnet.py": other})
    assert drift({FIRST: DDP, "fsdp_resnet.py": broken}) == [("fsdp_resnet.py", name)]
    mended = {}
    drift({FIRST: DDP, "fsdp_resnet.py": broken}, mended.__setitem__)
    assert mended == {"fsdp_resnet.py": other}
    assert drift({"dp_resnet.py": other, "fsdp_resnet.py": broken}) == [("fsdp_resnet.py", name)], "without ddp too"


def test_changed_lines():
    assert changed_lines(DDP, DDP) == 0
    assert changed_lines(DDP, DDP.replace("One", "Two") + "more\n") == 3


if __name__ == "__main__":
    fix = (lambda name, text: (RECIPES / name).write_text(text)) if "--fix" in sys.argv else None
    for recipe, name in drift(read(RECIPES), fix):
        print(f"{recipe}: {name} {'was' if fix else 'is'} not as in the others")
    texts = read(RECIPES)
    print(
        "CHANGED_LINES =", {name: changed_lines(texts[FIRST], texts[name]) for name in sorted(texts) if name != FIRST}
    )
