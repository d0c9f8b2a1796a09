"""`inspect`: what it says of right and of broken checkpoints, as tables and as JSON."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from files import edit_json, write_raw, write_tensors
from json_schema import violations
from models import CHAT_TEMPLATE, LLAMA3_SCALING, llama_config, write_byte_tokenizer, write_rand

from tinyvllm_cli.commands import inspect as inspect_module
from tinyvllm_cli.commands.inspect import InspectOptions, InspectResult, run
from tinyvllm_cli.errors import ExitCode, UserError
from tinyvllm_cli.memory.plan import plan_buffers
from tinyvllm_cli.render.console import Console
from tinyvllm_cli.render.inspect import show
from tinyvllm_cli.render.table import size

SCHEMA = json.loads(Path(inspect_module.__file__).with_name("inspect.schema.json").read_text())


class Terminal(io.StringIO):
    """Takes itself for a terminal."""

    def isatty(self) -> bool:
        return True


def look(
    path: Path, mode: Any = "human", stream: type[io.StringIO] = io.StringIO, **options: Any
) -> tuple[InspectResult, str, str]:
    """The result, stdout and stderr."""
    out, err = stream(), io.StringIO()
    result = run(InspectOptions(path, **{"device": "cpu", **options}))
    show(result, Console(mode, out=out, err=err))
    if mode == "json":
        assert not violations(json.loads(out.getvalue()), SCHEMA, SCHEMA)
    return result, out.getvalue(), err.getvalue()


def program(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tinyvllm_cli", "inspect", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def cpu_seconds(*arguments: str | Path) -> float:
    """CPU time of the whole program."""
    before = os.times()
    assert program(*arguments).returncode == ExitCode.OK
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


# --- right checkpoints -----------------------------------------------------------------------------------------------


def test_tables_fit_80_columns_and_say_it_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")  # no colours
    scaling = {**LLAMA3_SCALING, "original_max_position_embeddings": 8192}
    folder = write_rand(tmp_path / "m", rope_theta=500000.0, rope_scaling=scaling, chat_template=CHAT_TEMPLATE)
    result, out, err = look(folder, stream=Terminal)
    assert result.exit_code is ExitCode.OK
    assert err == ""
    assert max(map(len, out.splitlines()[1:])) <= 80  # the first line is the path
    wide = look(folder, stream=Terminal, check_data=True, diff=write_rand(tmp_path / "n", layers=2), tensors="*")[1]
    assert max(len(line) for line in wide.splitlines() if str(tmp_path) not in line) <= 80
    words = " ".join(out.split())
    for text in (
        "LlamaForCausalLM, 3 layers, hidden size 256",
        "4 query heads of 64, 2 KV heads (2 query heads share one)",
        "300 tokens, embeddings not tied",
        "theta 500,000, Llama 3 scaling: factor 32, low 1, high 4, made for 8,192",
        "BOS 256, EOS 257",
        "Chat template yes",
        "on the CPU and CUDA",
        "model.layers.{0-2}.mlp.down_proj.weight F32 256 x 512 3 1,572,864",
        "F32 30 1,924,864 7,699,456 100.0%",
        "norms 7 1,792 7,168 0.1%",
        "KV a token 3.00 KiB, a block 48.00 KiB",
    ):
        assert text in words


def test_json_holds_it_all(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", dtype="bfloat16", num_shards=3)
    result, out, _ = look(folder, "json", max_num_seqs=4, max_batched_tokens=64, max_model_len=100)
    content = json.loads(out)
    memory = content["memory"]
    tensor = next(t for t in content["tensors"] if t["name"] == "model.layers.0.input_layernorm.weight")
    shard = "model-00001-of-00003.safetensors"
    assert tensor == {"name": tensor["name"], "dtype": "BF16", "shape": [256], "data_offsets": [153600, 154112],
                      "file": shard, "part": "norms"}  # fmt: skip
    assert content["totals"]["num_tensors"] == 30
    assert content["totals"]["by_dtype"]["BF16"]["num_bytes"] == 3849728
    assert [file["num_tensors"] for file in content["files"]] == [10, 10, 10]
    assert [file["layers"] for file in content["files"]] == [[0], [1, 2], [2]]
    assert content["config"]["num_kv_heads"] == 2
    assert content["config"]["eos_token_ids"] == [257]
    assert (memory["weights_bytes"], memory["dtype"]) == (2 * 3849728, "float32")
    assert result.config is not None
    assert result.plan is not None
    plan = plan_buffers(result.config, result.plan.limits, "float32")
    assert [(b["name"], b["bytes"], b["formula"], b["role"]) for b in content["buffers"]] == [
        (b.name, b.nbytes, b.formula, b.role) for b in plan.buffers
    ]
    assert memory["buffers_bytes"] == plan.total_bytes
    assert memory["kv_bytes_per_token"] == 3 * 2 * 2 * 64 * 4
    assert content["kv_cache"]["num_blocks"] == 4 * 7
    assert content["faults"] == content["unsupported"] == content["warnings"] == []


def test_c02_tied_weights_count_once(tmp_path: Path) -> None:
    parameters = {}
    for variant in ("tied", "tied_copy", "tied_different", "untied"):
        result, out, err = look(write_rand(tmp_path / variant, tied_variant=variant))
        parameters[variant] = result.totals.all.num_parameters
        assert ("embeddings tied" in out) == (variant in ("tied", "tied_copy"))
        assert ("lm_head.weight is used for the logits" in err) == (variant == "tied_different")
    assert parameters["tied"] == parameters["tied_copy"] == parameters["untied"] - 300 * 256
    result, _, err = look(write_rand(tmp_path / "missing", tied_variant="untied_missing"))
    assert result.exit_code is ExitCode.ERROR
    assert "tensor lm_head.weight [300, 256] is missing" in err


def test_names_are_shown_literally(tmp_path: Path) -> None:
    name = "[bold red]x[/] :smile: \x1b[2J\n\u202e"
    path = write_tensors(tmp_path / "x.safetensors", {name: np.zeros(3, np.float32)})
    result, out, _ = look(path)
    assert result.config is None
    assert "[bold red]x[/] :smile: \\x1b[2J\\n\\u202e" in out
    assert "\x1b" not in out
    assert json.loads(look(path, "json")[1])["tensors"][0]["name"] == name


def test_a_lone_file_and_a_shard(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    result, _, err = look(shard)
    assert (result.config, result.plan, result.exit_code, err) == (None, None, ExitCode.OK, "")
    assert result.totals.all.num_tensors == 10
    assert look(folder / "model.safetensors.index.json")[0].plan is not None
    assert look(write_rand(tmp_path / "n") / "model.safetensors")[0].plan is not None


def test_nothing_to_show_is_said(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "x.safetensors", {})
    assert "there are no tensors in it" in look(path)[2]
    folder = write_rand(tmp_path / "m")
    assert "no tensor is called *.bias" in look(folder, tensors="*.bias")[2]
    assert look(folder, tensors="*.weight")[2] == ""


def test_a_hundred_gigabytes(tmp_path: Path) -> None:
    """A sharded 70B checkpoint, as sparse files: layers are folded, and only headers are read."""
    config = llama_config(
        hidden=8192, layers=80, heads=64, kv_heads=8, intermediate=28672, vocab=128256, dtype="bfloat16"
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    attention = {"q": 8192, "k": 1024, "v": 1024, "o": 8192}
    layer = {f"self_attn.{part}_proj": (rows, 8192) for part, rows in attention.items()}
    layer |= {"mlp.gate_proj": (28672, 8192), "mlp.up_proj": (28672, 8192), "mlp.down_proj": (8192, 28672)}
    layer |= {"input_layernorm": (8192,), "post_attention_layernorm": (8192,)}
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (128256, 8192)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(80) for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (8192,), "lm_head.weight": (128256, 8192)}
    weight_map = {}
    for shard in range(30):
        file, end, header = f"model-{shard + 1:05d}-of-00030.safetensors", 0, {}
        for name in list(shapes)[shard::30]:
            begin, end = end, end + 2 * int(np.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [begin, end]}
            weight_map[name] = file
        path = write_raw(tmp_path / file, header)
        os.truncate(path, path.stat().st_size + end)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    result, out, err = look(tmp_path)
    assert result.exit_code is ExitCode.OK, err
    assert result.totals.all.num_parameters == 70_553_706_496
    assert "model.layers.{0-79}.mlp.up_proj" in "".join(out.split())
    assert len(out.splitlines()) < 130
    assert min(cpu_seconds(tmp_path) for _ in range(3)) < 0.3  # the best of some runs, for the machine may be busy


# --- faults ----------------------------------------------------------------------------------------------------------


def test_c08_through_the_program(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    done = program(folder)
    assert done.returncode == ExitCode.ERROR
    assert "model-00002-of-00003.safetensors: the shard is missing" in done.stderr
    assert "Traceback" not in done.stderr
    done = program(folder, "--json")
    assert done.returncode == ExitCode.ERROR
    assert "model-00002-of-00003.safetensors" in json.loads(done.stdout)["faults"][0]["where"]


def test_c08_the_other_faults(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    write_tensors(folder / "extra.safetensors", {"model.norm.weight": np.zeros(7, np.float32)})
    result, out, err = look(folder)
    assert result.exit_code is ExitCode.OK
    assert "ignored: extra.safetensors" in err
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": "model-00001-of-00003.safetensors"})
    assert "tensor model.norm.weight is not in this shard" in look(folder)[2]
    edit_json(index, weight_map=weight_map | {"model.norm.weight": "../outside.safetensors"})
    result, _, err = look(folder)
    assert result.exit_code is ExitCode.ERROR
    assert "../outside.safetensors, which is no plain file name" in err
    (empty := tmp_path / "empty").mkdir()
    result, out, err = look(empty)
    assert (result.exit_code, out) == (ExitCode.ERROR, "")
    assert "no weights" in err
    assert "config.json: there is no such file" in err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "looks like a Git LFS pointer"),
        (b"<!doctype html><html></html>", "looks like a web page"),
        (struct.pack("<Q", 2**63), "9,223,372,036,854,775,808"),
        (struct.pack("<Q", 2) + b"{}x", "expected 0 bytes, there are 1"),
    ],
)
def test_c09_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    folder = write_rand(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(content)
    for path in (folder, folder / "model.safetensors"):
        result, out, err = look(path)
        assert (result.exit_code, out) == (ExitCode.ERROR, "")
        assert message in err
        content_json = json.loads(look(path, "json")[1])
        assert message in content_json["faults"][0]["what"]


def test_all_faults_at_once(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", num_shards=3)
    edit_json(folder / "config.json", hidden_size=-1)
    (folder / "model-00001-of-00003.safetensors").write_bytes(b"")
    (folder / "model-00003-of-00003.safetensors").unlink()
    result, _, err = look(folder)
    assert len(result.faults) == 3
    assert all(text in err for text in ("3 faults", "hidden_size is -1", "is empty", "the shard is missing"))


def test_unsupported_is_not_faulty(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    result, out, err = look(folder)
    assert (result.exit_code, result.plan) == (ExitCode.OK, None)
    assert "model.norm.weight" in out
    assert "tinyvllm cannot run this model" in err
    assert "RoPE type yarn is not supported" in err
    assert "yarn" in json.loads(look(folder, "json")[1])["unsupported"][0]["what"]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        run(InspectOptions(tmp_path / "x"))
    done = program(tmp_path / "x")
    assert done.returncode == ExitCode.ERROR
    assert done.stdout == ""
    assert "no such file or folder" in done.stderr


def test_chat_template_in_every_place(tmp_path: Path) -> None:
    folder = write_rand(tmp_path / "m")
    assert look(folder)[0].has_chat_template is False
    write_byte_tokenizer(folder, chat_template=[{"name": "default", "template": CHAT_TEMPLATE}])
    assert look(folder)[0].has_chat_template is True
    write_byte_tokenizer(folder, chat_template=CHAT_TEMPLATE, chat_template_file=True)
    assert look(folder)[0].has_chat_template is True


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.50 KiB"), (2**30, "1.00 GiB"), (2**51, "2,048.00 TiB")],
)
def test_sizes(nbytes: int, text: str) -> None:
    assert size(nbytes) == text
