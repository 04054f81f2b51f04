"""The keywords of the public functions: what signatures and help() show of them, and what is said of unknown ones."""

import copy
import inspect
import pickle
import pydoc
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import normalize

import megabatch
from megabatch import reference
from megabatch.keywords import LeftOut

HOW = "exchange='auto', overlap=True, tile=None, memory_budget=None, backend='auto'"
GROUP = "group=<required if several ranks run>"
OF_A_LOSS = f"reduction='mean', return_stats=False, {GROUP}, grad_reduction='mean', {HOW}"
SCALE = "logit_scale=None"
FIRST, SMOOTH = "temperature=None, normalize=None", "label_smoothing=0.0"
IDS = "weight=None, ids=None, same_ids='mask'"
PAIR_IDS = "weight=None, query_ids=None, key_ids=None, negative_ids=None, same_ids='mask'"
FIXED = "*, learnable=False, max_logit_scale=100, normalize=True"
LEARNED = "*, learnable=True, max_logit_scale=100, normalize=None"
SIGNATURES = {
    "clip_loss": f"image_features, text_features, {SCALE}, *, logit_bias=None, {FIRST}, {SMOOTH}, {IDS}, {OF_A_LOSS}",
    "info_nce_loss": (
        f"query, key, {SCALE}, *, negatives=None, positives=None, {FIRST}, {SMOOTH}, {PAIR_IDS}, {OF_A_LOSS}"
    ),
    "siglip_loss": f"image_features, text_features, {SCALE}, logit_bias=None, *, {FIRST}, {IDS}, {OF_A_LOSS}",
    "nt_xent_loss": f"view1, view2, {SCALE}, *, {FIRST}, {SMOOTH}, {IDS}, {OF_A_LOSS}",
    "supcon_loss": f"features, labels, {SCALE}, *, {FIRST}, {SMOOTH}, weight=None, {OF_A_LOSS}",
    "retrieval_ranks": f"query, key, *, positives=None, normalize=False, {GROUP}, {HOW}",
    "ClipLoss": f"init_logit_scale={1 / 0.07}, {LEARNED}, {SMOOTH}, same_ids='mask', {OF_A_LOSS}",
    "SigLipLoss": f"init_logit_scale=10, init_logit_bias=-10, {LEARNED}, same_ids='mask', {OF_A_LOSS}",
    "InfoNCELoss": f"temperature=0.05, {FIXED}, {SMOOTH}, same_ids='mask', {OF_A_LOSS}",
    "NTXentLoss": f"temperature=0.5, {FIXED}, {SMOOTH}, same_ids='mask', {OF_A_LOSS}",
    "SupConLoss": f"temperature=0.1, {FIXED}, {SMOOTH}, {OF_A_LOSS}",
}
FUNCTIONS = [*(name for name in SIGNATURES if name[0].islower()), "similarity_topk"]
LOSSES = FUNCTIONS[:5]
MODULES = [name for name in SIGNATURES if name[0].isupper()]


def arguments(name: str) -> dict[str, Any]:
    """The least that a function needs."""
    rows = normalize(torch.randn(4, 3), dim=1)
    if name == "supcon_loss":
        return {"features": rows, "labels": torch.zeros(4, dtype=torch.long), "logit_scale": 5.0}
    first, second = list(inspect.signature(getattr(megabatch, name)).parameters)[:2]
    more = {"logit_scale": 5.0} if name in LOSSES else {"k": 2} if name == "similarity_topk" else {}
    return {first: rows, second: rows, **more}


def without_types(signature: inspect.Signature) -> str:
    parameters = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty)).strip("()")


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_show_every_keyword_in_order_with_its_default(name: str) -> None:
    assert without_types(inspect.signature(getattr(megabatch, name))) == SIGNATURES[name]


@pytest.mark.parametrize("name", [*SIGNATURES, "similarity_topk"])
def test_signatures_show_types_as_users_write_them(name: str) -> None:
    signature = inspect.signature(getattr(megabatch, name))
    assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())
    assert not re.search("ellipsis|Ellipsis|Annotated|Unpack|LeftOut", str(signature))
    assert signature.parameters["memory_budget"].annotation == int | str | None


@pytest.mark.parametrize(
    ("library", "name"),
    [*((megabatch, name) for name in [*FUNCTIONS, *MODULES]), *((reference, name) for name in FUNCTIONS)],
)
def test_help_says_what_every_keyword_means(library: Any, name: str) -> None:
    public = getattr(library, name)
    text = inspect.getdoc(public)
    assert text.count("\nArgs:\n    ") == 1
    of_function = ("logit_bias", "negatives", "positives", "exclude")  # explained in the text of the reference
    for parameter in inspect.signature(public).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and (library is megabatch or parameter.name not in of_function):
            assert len(re.findall(rf"^    {parameter.name}: \S", text, re.MULTILINE)) == 1, parameter.name
    assert max(map(len, text.splitlines())) <= 120
    assert "max_logit_scale" in pydoc.render_doc(public) or name in FUNCTIONS


def test_args_stand_before_what_is_returned() -> None:
    text = inspect.getdoc(megabatch.similarity_topk)
    assert text.index("backend:") < text.index("\nReturns:\n")


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_function_itself_and_no_wrapper(name: str) -> None:
    function = getattr(megabatch, name)
    assert inspect.unwrap(function) is function
    assert function.__code__.co_name == name


@pytest.mark.parametrize("library", [megabatch, reference], ids=["megabatch", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_unknown_keywords_are_met_with_the_known(library: Any, name: str) -> None:
    keywords = inspect.signature(getattr(reference, name)).parameters.values()
    known = ", ".join(keyword.name for keyword in keywords if keyword.kind is keyword.KEYWORD_ONLY)
    with pytest.raises(TypeError) as caught:
        getattr(library, name)(**arguments(name), colour=1)
    assert str(caught.value) == f"{name}: colour is not an option. Options are: {known}."
    with pytest.raises(TypeError, match=f"^{name}: memory_buget is not an option. Perhaps memory_budget is meant. Opt"):
        getattr(library, name)(**arguments(name), memory_buget="1MiB")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("keyword", ["name", "ranks", "needs", "site", "given", "function", "self"])
def test_unknown_keywords_may_have_any_name(name: str, keyword: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: {keyword} is not an option"):
        getattr(megabatch, name)(**arguments(name), **{keyword: 1})


@pytest.mark.parametrize("name", MODULES)
def test_unknown_keywords_of_a_module_are_met_with_the_known(name: str) -> None:
    with pytest.raises(TypeError, match=f"^{name}: max_scale is not an option. Perhaps max_logit_scale is meant. Opt"):
        getattr(megabatch, name)(max_scale=50)


def test_a_misspelt_positional_argument_is_found_too() -> None:
    image = normalize(torch.randn(4, 3), dim=1)
    with pytest.raises(TypeError, match=r"logit_scal is not an option\. Perhaps logit_scale is meant"):
        megabatch.clip_loss(image, image, logit_scal=5.0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", [LeftOut.GROUP, ...], ids=repr)
def test_group_may_be_left_out_by_name(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given, function = arguments(name), getattr(megabatch, name)
    torch.testing.assert_close(function(**given, group=value), function(**given), rtol=0, atol=0)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ValueError, match=f"^{name}: group must be given, because torch.distributed runs with 3 ranks"):
        function(**given, group=value)


@pytest.mark.parametrize("group", [{}, {"group": LeftOut.GROUP}, {"group": ...}, {"group": None}], ids=repr)
def test_a_compiler_takes_every_spelling_of_this_process_alone(group: dict[str, Any]) -> None:
    torch._dynamo.reset()
    given = arguments("clip_loss")
    compiled = torch.compile(lambda: megabatch.clip_loss(**given, **group), fullgraph=True, backend="aot_eager")
    assert compiled() == megabatch.clip_loss(**given)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_modules_can_be_copied(duplicate: Any) -> None:
    module = megabatch.InfoNCELoss(0.1, label_smoothing=0.1)
    rows = torch.randn(4, 3)
    assert duplicate(module)(rows, rows.flip(0)) == module(rows, rows.flip(0))


def test_a_subclass_of_a_module_has_its_own_signature() -> None:
    class Mine(megabatch.ClipLoss):
        def __init__(self, colour: str) -> None:
            super().__init__(normalize=True)
            self.colour = colour

    assert list(inspect.signature(Mine).parameters) == ["colour"]
    assert Mine("red").options == {"normalize": True}
