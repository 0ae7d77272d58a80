"""The patch itself, on a package made for it: what is rebound, what comes back, and what is refused."""

from __future__ import annotations

import importlib
import re
import sys
import textwrap

import pytest
from support.process import run_python

from fused_logp_hub import FusedLogpError, IntegrationError
from fused_logp_hub.integrations import Patch

FILES = {
    "madeup/__init__.py": "",
    "madeup/ops.py": """
        def score(logits, labels, scale=1.0):
            return "original"

        def other():
            return "other"

        def through_global():
            return score(None, None)
    """,
    "madeup/user.py": "from madeup.ops import score, other, score as alias",
    "madeup/late.py": "from madeup.ops import score",
    "madeup/broken.py": "import a_module_that_is_not_there",
    "madeup_neighbour.py": "from madeup.ops import score",
    "madeup-1.2.3.dist-info/METADATA": "Metadata-Version: 2.1\nName: madeup\nVersion: 1.2.3\n",
}
# `argument: expected X, got Y. What to do.`
FORM = r"^{name}: expected .+, got .+\. .+\.$"


def score(logits, labels, scale: float = 1.0) -> str:
    return "replacement"


@pytest.fixture
def madeup(tmp_path, monkeypatch):
    """The package, installed and imported, but for ``late``."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("madeup.ops", "madeup.user", "madeup_neighbour"):
        importlib.import_module(name)
    yield sys.modules["madeup.ops"]
    for name in [n for n in sys.modules if n.startswith("madeup")]:
        del sys.modules[name]


def make_patch(versions=">=1,<2", module="madeup.ops", package="madeup", **replacements):
    return Patch(package, versions, module, replacements or {"score": score})


def bindings() -> dict:
    return {n: dict(vars(m)) for n, m in sys.modules.items() if n.startswith("madeup")}


def test_replaces_every_binding_and_nothing_else(madeup):
    before = bindings()
    user = sys.modules["madeup.user"]
    with make_patch():
        assert madeup.score is user.score is user.alias is score
        assert madeup.through_global() == "replacement"
        changed = {(m, n) for m, names in bindings().items() for n, v in names.items() if v is not before[m].get(n)}
        assert changed == {("madeup.ops", "score"), ("madeup.user", "score"), ("madeup.user", "alias")}
    assert bindings() == before


def test_restores_modules_that_were_imported_inside(madeup):
    with make_patch():
        late = importlib.import_module("madeup.late")
        assert late.score is score
    assert late.score is madeup.score
    assert madeup.score(0, 0) == "original"


def test_restores_after_an_error(madeup):
    before = bindings()
    patch = make_patch()
    with pytest.raises(ZeroDivisionError), patch:
        _ = 1 / 0
    assert bindings() == before
    assert not patch.active


def test_nested_use_restores_with_the_last(madeup):
    before = bindings()
    patch = make_patch()
    patch.enable()
    with patch, patch:
        assert madeup.score is score
    assert patch.active
    assert madeup.score is score
    patch.disable()
    assert not patch.active
    assert bindings() == before


def test_as_a_decorator(madeup):
    @make_patch()
    def inside():
        return madeup.score(0, 0)

    assert inside() == "replacement"
    assert madeup.score(0, 0) == "original"


def test_leaves_alone_what_somebody_else_put_there(madeup):
    """Taking the patch out does not undo another's."""
    user = sys.modules["madeup.user"]
    with make_patch():
        user.alias = len
    assert user.alias is len
    assert user.score is madeup.score


def test_disable_without_enable(madeup):
    with pytest.raises(IntegrationError, match=FORM.format(name="madeup")):
        make_patch().disable()


def test_importing_the_drop_ins_imports_no_package(tmp_path):
    run_python(
        """
        import sys
        before = set(sys.modules)
        from fused_logp_hub import integrations
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        assert not new & {"trl", "verl", "openrlhf", "transformers"}, new
        assert not any(getattr(integrations, name).patch.active for name in ("trl", "verl", "openrlhf"))
        """,
        tmp_path,
    )


def other(argument):
    return "replacement"


REFUSED = {
    "an older range": ("madeup", {"versions": ">=1.3"}, "got 1.2.3"),
    "a newer range": ("madeup", {"versions": ">=1,<1.2"}, "got 1.2.3"),
    "not installed": ("not-madeup", {"package": "not-madeup"}, "got no installation"),
    "a module that is gone": ("madeup.gone", {"module": "madeup.gone"}, "got ModuleNotFoundError"),
    "a module that fails": ("madeup.broken", {"module": "madeup.broken"}, "a_module_that_is_not_there"),
    "a function that is gone": ("madeup.ops.gone", {"gone": score}, "got none"),
    "other parameters": ("madeup.ops.other", {"score": score, "other": other}, "(argument), got ()"),
    "another name": ("madeup.ops.score", {"score": lambda x, labels, scale=1.0: 0}, "got (logits, labels, scale=1.0)"),
    "another default": ("madeup.ops.score", {"score": lambda logits, labels, scale=2.0: 0}, "scale=2.0), got"),
    "another kind": ("madeup.ops.score", {"score": lambda logits, labels, *, scale=1.0: 0}, "*, scale=1.0), got"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_what_it_does_not_know(madeup, case):
    """A named error, and nothing is replaced; also where only the second of two functions is unknown."""
    name, options, got = REFUSED[case]
    patch, before = make_patch(**options), bindings()
    with pytest.raises(IntegrationError, match=FORM.format(name=re.escape(name))) as error, patch:
        pass
    assert got in str(error.value)
    assert isinstance(error.value, FusedLogpError)
    assert isinstance(error.value, RuntimeError)
    after = bindings()
    assert {name: after[name] for name in before} == before
    assert not patch.active
