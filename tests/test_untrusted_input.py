"""Nothing that comes from outside is ever run: what could do so is in no module."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
METHODS = {"torch.load", "yaml.load", "yaml.unsafe_load", "os.system", "os.popen"}
OPTIONS = {"trust_remote_code", "shell", "allow_pickle"}
"""Keywords that may be nothing but False."""


def offences(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (f"line {node.lineno}: imports {name}" for name in names if name.split(".")[0] in MODULES)
        elif isinstance(node, ast.Call):
            called = node.func
            if isinstance(called, ast.Name) and called.id in BUILTINS:
                yield f"line {node.lineno}: calls {called.id}"
            elif isinstance(called, ast.Attribute) and ast.unparse(called) in METHODS:
                yield f"line {node.lineno}: calls {ast.unparse(called)}"
            for keyword in node.keywords:
                if keyword.arg in OPTIONS and ast.unparse(keyword.value) != "False":
                    yield f"line {node.lineno}: {keyword.arg} is not plainly False"
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in OPTIONS and ast.unparse(value) != "False":
                    yield f"line {node.lineno}: {key.value} is not plainly False"


def test_no_module_unpickles_evaluates_or_trusts_code() -> None:
    found = [
        f"{path.relative_to(ROOT)} {offence}"
        for folder in ("streamkv", "engine", "gateway")
        for path in (ROOT / folder).rglob("*.py")
        for offence in offences(path.read_text())
    ]
    assert not found, found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from cloudpickle import loads",
        "eval(text)",
        "torch.load(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=is_trusted)",
        "settings = {'trust_remote_code': True}",
        "subprocess.run(command, shell=True)",
        "numpy.load(path, allow_pickle=True)",
    ],
)
def test_what_would_is_found(source: str) -> None:
    assert list(offences(source))
