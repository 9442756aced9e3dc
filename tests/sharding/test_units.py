"""Which modules become units, and which unit a parameter belongs to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_dist.dist.mesh import build_mesh
from hf_dist.errors import ModelError
from hf_dist.memory.offload.storage import Storage
from hf_dist.sharding import units as unit_rules
from hf_dist.sharding.placement import ZERO_STAGES
from hf_dist.sharding.precision import Precision
from hf_dist.sharding.unit import ShardUnit
from hf_dist.sharding.units import build_units, find_unit_modules
from tests.parity.families import make_model
from tests.sharding.models import Block, EmbeddingNet, MixedNet, Net, SiblingPaths


def units_of(model: nn.Module) -> dict[str, ShardUnit]:
    """Units by path, built in this process alone."""
    units = build_units(model, ZERO_STAGES[0], build_mesh(device="cpu"), Precision(), Storage(torch.device("cpu")))
    return {u.name: u for u in units}


def names_in(unit: ShardUnit) -> set[str]:
    """Full names of a unit's parameters."""
    return {slot.name for g in unit.groups for slot in g.layout.slots}


BLOCKS = {
    "llama": [f"model.layers.{i}" for i in range(3)],
    "gpt2": [f"transformer.h.{i}" for i in range(3)],
    "bert": [f"bert.encoder.layer.{i}" for i in range(3)],
    "t5": [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in range(2)],
    "vit": [f"vit.layers.{i}" for i in range(3)],
    "qwen3_moe": [f"model.layers.{i}" for i in range(3)],
}


@pytest.mark.parametrize("family", BLOCKS)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_blocks_of_hugging_face_models_are_units(family: str, lora: bool) -> None:
    model = make_model(family, lora=lora)
    prefix = "base_model.model." if lora else ""
    found = list(find_unit_modules(model))
    blocks = [prefix + path for path in BLOCKS[family]]
    assert [path for path in found if path in blocks] == blocks
    others = [path for path in found if path not in blocks]
    assert all("embed" in path.lower() for path in others), others  # marked by the author, such as `ViTEmbeddings`


@pytest.mark.parametrize("family", BLOCKS)
def test_every_parameter_is_in_exactly_one_slot(family: str) -> None:
    model = make_model(family, lora=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    names = [n for unit in units_of(model).values() for n in sorted(names_in(unit))]
    assert sorted(names) == sorted(before)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_sequential_with_other_ends_has_its_blocks_as_units() -> None:
    model = nn.Sequential(nn.Embedding(5, 24), Block(), Block(), nn.Linear(24, 5))
    assert list(find_unit_modules(model)) == ["1", "2"]


def test_alternating_blocks_are_all_units() -> None:
    class Other(Block):
        pass

    model = nn.ModuleList([Block(), Other(), Block(), Other()])
    assert list(find_unit_modules(model)) == ["0", "1", "2", "3"]


def test_layers_without_children_are_not_units() -> None:
    assert find_unit_modules(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))) == {}
    assert find_unit_modules(nn.ModuleList([Block()])) == {}


def test_units_do_not_nest_and_lists_in_lists_are_looked_into() -> None:
    model = nn.ModuleDict({"stages": nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(2))})
    assert list(find_unit_modules(model)) == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    experts = Net()
    for block in experts.blocks:
        block.experts = nn.ModuleList([Block(), Block()])
    assert list(find_unit_modules(experts)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_sequence_of_sequences_is_one_unit_each() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))
    assert list(find_unit_modules(model)) == ["0", "1", "2"]


def test_blocks_without_parameters_are_no_units() -> None:
    assert find_unit_modules(nn.Sequential(*(nn.Sequential(nn.ReLU()) for _ in range(3)))) == {}


def test_a_module_shared_between_two_places_belongs_to_the_root() -> None:
    units = units_of(SiblingPaths())
    assert set(units) == {"", "left.0", "right.1"}
    assert names_in(units[""]) == {f"left.1.{n}" for n, _ in Block().named_parameters()}


def test_weights_tied_between_units_belong_to_the_root() -> None:
    model = Net()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    units = units_of(model)
    assert "blocks.0.up.weight" in names_in(units[""])
    assert "blocks.0.down.weight" in names_in(units["blocks.0"])
    assert model.blocks[2].up.weight is model.blocks[0].up.weight


def test_weights_tied_within_a_block_stay_in_it() -> None:
    model = Net()
    for block in model.blocks:
        block.again = block.up
        block.third = nn.Linear(24, 48)
        block.third.weight = block.up.weight
    units = units_of(model)
    assert {"blocks.1.up.weight", "blocks.1.third.bias"} <= names_in(units["blocks.1"])


@pytest.mark.parametrize("tied", [False, True])
def test_a_large_embedding_is_a_unit_unless_it_is_tied(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    monkeypatch.setattr(unit_rules, "OWN_UNIT_EMBEDDING_NUMEL", 37 * 24)
    units = units_of(EmbeddingNet(tied))
    assert ("embed" in units) is not tied
    assert ("embed.weight" in names_in(units[""])) is tied
    monkeypatch.setattr(unit_rules, "OWN_UNIT_EMBEDDING_NUMEL", 37 * 24 + 1)
    assert "embed" not in units_of(EmbeddingNet(tied))


@pytest.mark.parametrize(
    "leaf",
    [(("Linear",), (), ()), ((), ("first", "head"), ()), ((), (), ("first", "head"))],
    ids=["class", "name", "end"],
)
def test_leaf_modules_are_units(leaf: unit_rules.LeafModules) -> None:
    found = list(find_unit_modules(Net(), leaf))
    assert found == ["first", "blocks.0", "blocks.1", "blocks.2", "head"]


def test_groups_have_one_dtype_and_one_requires_grad() -> None:
    unit = units_of(MixedNet())["blocks.1"]
    assert {g.trainable for g in unit.groups} == {True, False}
    assert all(p.dtype == g.dtype and p.requires_grad == g.trainable for g in unit.groups for p in g.params)


def test_a_model_without_parameters_has_an_empty_root() -> None:
    units = units_of(nn.ReLU())
    assert list(units) == [""] and units[""].groups == []


def test_a_model_is_sharded_once() -> None:
    model = Net()
    units = units_of(model)
    with pytest.raises(ModelError, match="shares parameters with a prepared model"):
        units_of(model)
    assert units


class _Tower(nn.Module):
    """A text tower whose author marked the embeddings as a block; other modules call them past it, as in ModernVBert."""

    _no_split_modules = ("EmbeddingNet",)

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingNet()
        self.other = EmbeddingNet()

    def get_input_embeddings(self) -> nn.Module:
        return next(m for m in self.embeddings.modules() if isinstance(m, nn.Embedding))


def test_a_marked_module_around_the_input_embeddings_is_no_block() -> None:
    found = find_unit_modules(_Tower())
    assert "other" in found and "embeddings" not in found
