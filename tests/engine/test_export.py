"""Stored adapters for the world outside: PEFT loads them as they are, and merged they need no PEFT."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from everloop_trainer import merging, peftfiles
from everloop_trainer.about import About
from everloop_trainer.engine import state
from everloop_trainer.engine.base import BaseModel, load_base
from everloop_trainer.engine.config import SpareConfig
from everloop_trainer.engine.lora import Adapter, Entry, LoraSpec
from everloop_trainer.engine.model import load_adapter
from tests.engine.client import LORA, Engine, Refused, datum, request
from tests.engine.reference import randomise

ABOUT = About("test/model", "abc123", "s-1:train:0", "final")
SPEC = LoraSpec(rank=4, seed=1, train_mlp=True, train_attn=True, train_unembed=True)
TOKENS = torch.arange(5, 42)[None]


def stored(directory: Path, base: BaseModel, spec: LoraSpec) -> Adapter:
    """An adapter with values of a trained one, in a directory as a named save leaves it."""
    adapter = Adapter(spec, base.targets)
    adapter.initialise()
    randomise(adapter)
    path = directory / "state.safetensors"
    state.write_state(path, state.StateFile(spec, adapter.entries, 9, 4, {"weights": adapter.flat.detach().numpy()}))
    assert peftfiles.complete(path, ABOUT)
    return adapter


def peft_model(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    """What somebody who has the two directories loads."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, on names in transformers, and on merging a tied head in place
        return PeftModel.from_pretrained(model, adapter).eval()


def engine_logits(base: BaseModel, adapter: Adapter | None) -> torch.Tensor:
    """The logits that an engine computes from."""
    base.use(adapter)
    with torch.no_grad():
        logits = base.logits(base.hidden(TOKENS)[0])
    base.use(None)
    return logits


def peft_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=TOKENS).logits[0].float()
    return logits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "spec",
    [SPEC, replace(SPEC, rank=5), replace(SPEC, train_unembed=False, train_mlp=False), replace(SPEC, train_attn=False)],
    ids=["rank 4", "rank 5", "attention", "MLP and head"],
)
def test_peft_computes_the_same_logits(tiny_model: Path, tmp_path: Path, spec: LoraSpec, dtype: Any) -> None:
    """Bit by bit, whatever the rank, the modules and the base model's dtype; the adapter stays float32."""
    config = SpareConfig(Path("unused"), tiny_model, "test", max_sequence_length=512, dtype=dtype)
    base = load_base(config)
    adapter = stored(tmp_path, base, spec)
    model = peft_model(tiny_model, tmp_path, getattr(torch, dtype))
    found = peft_logits(model)
    assert {leaf.dtype for name, leaf in model.named_parameters() if "lora_" in name} == {torch.float32}
    assert torch.equal(found, engine_logits(base, adapter))
    assert not torch.equal(found, engine_logits(base, None))


@pytest.mark.slow
def test_a_trained_adapter_of_real_weights(real_spare: Path, real_model: Path, tmp_path: Path) -> None:
    """SmolLM2: what an engine trained and wrote has the engine's logits in PEFT, and those of PEFT's merge merged."""
    lora = {**LORA, "rank": 12}
    path = tmp_path / "adapter" / "state.safetensors"
    with Engine(real_spare) as engine:
        engine.call("init", model="m", **lora)
        for seq in (1, 3):
            engine.step("m", seq, request(datum(range(100, 140))), learning_rate=1e-2)
        about = {name: getattr(ABOUT, name) for name in ABOUT.__dataclass_fields__}
        engine.call("write", model="m", seq=4, path=str(path), parts="weights", about=about)
    base = load_base(SpareConfig(Path("unused"), real_model, "test"))
    adapter, _ = load_adapter(base, path, LoraSpec(**lora), "weights")
    model = peft_model(real_model, path.parent)
    assert torch.equal(peft_logits(model), engine_logits(base, adapter))
    assert not torch.equal(engine_logits(base, adapter), engine_logits(base, None))

    merged = merge(path.parent, real_model, tmp_path / "merged")
    torch.testing.assert_close(peft_logits(merged), engine_logits(base, adapter), rtol=1e-4, atol=1e-2)


def merge(adapter: Path, base: Path, out: Path) -> Any:
    """The merged model as transformers loads it."""
    assert merging.main(["--adapter", str(adapter), "--base-model", str(base), "--out", str(out)]) == 0
    return AutoModelForCausalLM.from_pretrained(out)


@pytest.mark.parametrize("shards", [False, True], ids=["one file", "several"])
@pytest.mark.parametrize("spec", [SPEC, replace(SPEC, train_unembed=False)], ids=["with head", "without head"])
def test_merged_weights_are_those_of_pefts_own_merge(
    tiny_model: Path, tiny_base: BaseModel, tmp_path: Path, spec: LoraSpec, shards: bool
) -> None:
    """Bit by bit; a tied head that was trained becomes a tensor of its own, and the embedding stays as it was."""
    source = tiny_model
    if shards:
        source = tmp_path / "sharded"
        shutil.copytree(tiny_model, source, ignore=shutil.ignore_patterns("*.safetensors"))
        AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(source, max_shard_size="100KB")
        assert len(list(source.glob("*.safetensors"))) > 2
    stored(tmp_path / "adapter", tiny_base, spec)
    expected = peft_model(source, tmp_path / "adapter")
    head = expected.base_model.model.lm_head
    head = getattr(head, "base_layer", head)
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # PEFT would change the embedding with it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        weights = expected.merge_and_unload().state_dict()
    merged = merge(tmp_path / "adapter", source, tmp_path / "merged")
    assert merged.state_dict().keys() == weights.keys()
    for name, weight in merged.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert merged.config.tie_word_embeddings is not spec.train_unembed
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_a_merge_of_bfloat16_rounds_once(tiny_model: Path, tiny_base: BaseModel, tmp_path: Path) -> None:
    """The sum is made in float32; weights keep their dtype."""
    adapter = stored(tmp_path / "adapter", tiny_base, SPEC)
    AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    merged = merge(tmp_path / "adapter", tmp_path / "base", tmp_path / "merged").state_dict()
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, (a, b) in adapter.factors.items():
        weight = before[f"{name}.weight"]
        expected = (weight.float() + (b @ a).detach() * 8.0).to(torch.bfloat16)
        assert torch.equal(merged[f"{name}.weight"], expected), name


MEASURED = """
import pathlib, re, sys
from everloop_trainer import merging
def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
before = resident("VmRSS")
pathlib.Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
assert merging.main(sys.argv[1:]) == 0
print(resident("VmHWM") - before)
"""


def test_a_merge_needs_the_memory_of_a_tensor(tmp_path: Path) -> None:
    """A base model of 240 MB in one file, each weight of which changes, takes half of that at most."""
    size, layers = 1024, 60
    names = [f"model.layers.{index}.q_proj" for index in range(layers)]
    (tmp_path / "base").mkdir()
    save_file({f"{name}.weight": torch.ones(size, size) for name in names}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    entries = [
        Entry(f"base_model.model.{name}.lora_{factor}.weight", (1, size) if factor == "A" else (size, 1), start * size)
        for start, (name, factor) in enumerate((name, factor) for name in names for factor in "AB")
    ]
    path = tmp_path / "adapter" / "state.safetensors"
    flat = np.ones(2 * layers * size, np.float32)
    state.write_state(path, state.StateFile(replace(SPEC, rank=1), entries, 1, 1, {"weights": flat}))
    assert peftfiles.complete(path, ABOUT)
    options = ["--adapter", str(path.parent), "--base-model", str(tmp_path / "base"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(merging.__file__).parents[1])}
    command = [sys.executable, "-c", MEASURED, *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < layers * size * size * 4 / 2, "the resident set grew"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert len(file.keys()) == layers
        assert torch.equal(file.get_tensor(f"{names[-1]}.weight"), torch.full((size, size), 33.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "LOHA"}, "adapter_config.json: only plain LoRA"),
        ({"r": "x"}, "adapter_config.json: not the configuration of an adapter"),
        (None, "adapter_config.json"),
    ],
)
def test_what_is_no_adapter_is_named(
    tiny_model: Path,
    tiny_base: BaseModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any] | None,
    message: str,
) -> None:
    """On stderr with exit status 1, and nothing is left."""
    stored(tmp_path / "adapter", tiny_base, SPEC)
    path = tmp_path / "adapter" / peftfiles.CONFIG
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    options = ["--adapter", str(path.parent), "--base-model", str(tiny_model), "--out", str(tmp_path / "out" / "m")]
    assert merging.main(options) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_of_another_model_is_named(
    tiny_base: BaseModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first weight that is not there, or has another shape; nothing is left."""
    stored(tmp_path / "adapter", tiny_base, SPEC)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    options = ["--adapter", str(tmp_path / "adapter"), "--base-model", str(tmp_path / "other")]
    options += ["--out", str(tmp_path / "out" / "m")]
    shapes = {name: torch.zeros(2, 2) for name in ("lm_head.weight",)}
    save_file(shapes, tmp_path / "other" / "model.safetensors")
    assert merging.main(options) == 1
    assert "model.layers.0.mlp.down_proj.weight: the adapter changes it" in capsys.readouterr().err
    shapes = {f"{target.name}.weight": torch.zeros(2, 2) for target in tiny_base.targets}
    save_file(shapes, tmp_path / "other" / "model.safetensors")
    assert merging.main(options) == 1
    assert "lm_head.weight: the adapter is for shape [320, 64]" in capsys.readouterr().err
    assert not list((tmp_path / "out").iterdir())


def test_a_card_says_what_the_adapter_is(tiny_base: BaseModel, tmp_path: Path) -> None:
    """Base model, rank, targets, run and steps; the front matter is one that hubs read, whatever the names hold."""
    strange = replace(ABOUT, base_model='a: "b" # c', revision="")
    path = tmp_path / "state.safetensors"
    stored(tmp_path, tiny_base, SPEC)
    peftfiles.complete(path, strange)
    card = (tmp_path / peftfiles.CARD).read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["base_model"] == strange.base_model
    assert front["library_name"] == "peft"
    for row in ("| rank | 4 |", "| training run | `s-1:train:0` |", "| optimizer steps | 4 |", "lm_head, o_proj"):
        assert row in card
    assert json.loads((tmp_path / peftfiles.CONFIG).read_text())["revision"] is None


def test_a_directory_is_completed_again(tiny_base: BaseModel, tmp_path: Path) -> None:
    """By whoever was killed before: the same files, no others, and none of them a copy of the weights."""
    stored(tmp_path, tiny_base, SPEC)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert peftfiles.complete(tmp_path / "state.safetensors", ABOUT)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    assert first.keys() == {"state.safetensors", peftfiles.WEIGHTS, peftfiles.CONFIG, peftfiles.CARD}
    assert (tmp_path / "state.safetensors").samefile(tmp_path / peftfiles.WEIGHTS)


def test_what_has_more_than_weights_is_left_alone(tiny_base: BaseModel, tmp_path: Path) -> None:
    """A training checkpoint is no adapter to PEFT, nor is what is no state file at all."""
    adapter = Adapter(SPEC, tiny_base.targets)
    vector = adapter.flat.detach().numpy()
    groups = {"weights": vector, "adam.exp_avg": vector, "adam.exp_avg_sq": vector}
    path = tmp_path / "state.safetensors"
    state.write_state(path, state.StateFile(SPEC, adapter.entries, 1, 1, groups))
    (tmp_path / "junk").write_bytes(b"junk" * 10)
    for name in ("state.safetensors", "junk"):
        assert not peftfiles.complete(tmp_path / name, ABOUT)
    assert {path.name for path in tmp_path.iterdir()} == {"state.safetensors", "junk"}


def test_a_write_that_fails_beside_the_weights_leaves_nothing(tiny_spare: Path, tmp_path: Path) -> None:
    """The whole of it is tried again at the same place."""
    path = tmp_path / "place" / "state.safetensors"
    (path.parent / peftfiles.CONFIG).mkdir(parents=True)
    about = {name: getattr(ABOUT, name) for name in ABOUT.__dataclass_fields__}
    with Engine(tiny_spare) as engine:
        engine.call("init", model="m", **LORA)
        with pytest.raises(Refused, match=peftfiles.CONFIG):
            engine.call("write", model="m", seq=0, path=str(path), parts="weights", about=about)
        (path.parent / peftfiles.CONFIG).rmdir()
        engine.call("write", model="m", seq=0, path=str(path), parts="weights", about=about)
    assert len(list(path.parent.iterdir())) == 4
