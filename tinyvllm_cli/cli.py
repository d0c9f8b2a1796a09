"""The `tinyvllm` program: parses, calls commands/*, maps errors to exit codes. No torch here; rich only when needed."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from tinyvllm_cli import __version__, options
from tinyvllm_cli.errors import ExitCode, UserError, as_user_error
from tinyvllm_cli.options import Device, DType, Order, Preset, Sort, parse_bytes, parse_counts, parse_words

if TYPE_CHECKING:
    from tinyvllm_cli.render.console import Console

app = typer.Typer(
    help="Llama inference from checkpoint to text. `tinyvllm COMMAND --help` shows a command's options.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tinyvllm {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def inspect(
    path: Annotated[
        str | None,
        typer.Argument(help="Folder, .safetensors file, index.json, owner/model on the Hub, or demo. As for generate."),
    ] = None,
    revision: Annotated[str | None, typer.Option(metavar="NAME", help="Branch, tag or commit on the Hub.")] = None,
    tensors: Annotated[str | None, typer.Option(metavar="GLOB", help="List tensors: '*' or '*.mlp.*'.")] = None,
    sort: Annotated[Sort | None, typer.Option(help="List tensors in this order.")] = None,
    check_data: Annotated[
        bool, typer.Option("--check-data", help="Read all values: NaN, infinities, smallest, largest, histogram.")
    ] = False,
    diff: Annotated[
        str | None, typer.Option(metavar="OTHER", help="What another checkpoint has that differs; with data if read.")
    ] = None,
    preset: Annotated[
        Preset | None, typer.Option(help="The buffers of another engine, and ours for the same limits.")
    ] = None,
    memory: Annotated[
        int | None, typer.Option(parser=parse_bytes, metavar="SIZE", help="Plan for a GPU of so much: 24GiB.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
    device: Annotated[Device, typer.Option("--device", help="What to plan for, as for generate.")] = Device.AUTO,
    dtype: Annotated[DType, typer.Option("--dtype", help="Of weights, activations and cache.")] = DType.AUTO,
    max_num_seqs: options.MaxNumSeqs = None,
    max_model_len: options.MaxModelLen = None,
    max_batched_tokens: options.MaxBatchedTokens = None,
    block_size: options.BlockSize = 16,
    kv_cache_memory: options.KVCacheMemory = None,
    memory_fraction: options.MemoryFraction = 0.9,
) -> None:
    """Show what is in a checkpoint and what it takes to run it. Reads no weights unless told to."""

    def command(console: Console) -> int:
        from tinyvllm_cli.commands.inspect import InspectOptions, run
        from tinyvllm_cli.commands.model import DEMO, resolve_model
        from tinyvllm_cli.render.inspect import show

        if preset is not None:
            from tinyvllm_cli.commands.inspect_preset import preset as tiny_vllm
            from tinyvllm_cli.render.inspect_memory import show_preset

            show_preset(tiny_vllm(), console)
            return ExitCode.OK
        target = Path(path or ".")
        if path is None or path in ("", DEMO):
            model = resolve_model(path)
            console.note(model.note)
            target = model.path
        options = InspectOptions(
            path=target,
            revision=revision,
            tensors=tensors,
            sort=sort.value if sort else None,
            check_data=check_data,
            diff=Path(diff) if diff is not None else None,
            device=device.value,
            dtype=dtype.value,
            max_num_seqs=max_num_seqs,
            max_batched_tokens=max_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            memory=memory,
            memory_fraction=memory_fraction,
            kv_cache_memory=kv_cache_memory,
        )
        result = run(options, console.status)
        show(result, console)
        return result.exit_code

    _run(command, json, quiet)


@app.command()
def generate(
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; a single - reads standard input.")] = None,
    prompts_file: options.PromptsFile = None,
    prompt_format: options.Format = options.PromptFormat.AUTO,
    whole_file: Annotated[bool, typer.Option("--whole-file", help="The prompts file is one prompt.")] = False,
    model: options.Model = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text: leave the chat template out.")] = False,
    n: options.Samples = None,
    max_tokens: options.MaxTokens = None,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the most probable token.")] = False,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_ids: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = None,
    logprobs: options.Logprobs = None,
    output: options.Output = None,
    order: Annotated[Order, typer.Option(help="Of the records: as in the input, or as they are ready.")] = Order.INPUT,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the job of the output file.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
    stream: options.Stream = None,
    table: Annotated[bool, typer.Option("--table", help="All answers at the end, in a table.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object a prompt.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
    device: Annotated[Device, typer.Option("--device", help="Where to compute.")] = Device.AUTO,
    dtype: Annotated[DType, typer.Option("--dtype", help="Of weights, activations and cache.")] = DType.AUTO,
    max_num_seqs: options.MaxNumSeqs = None,
    max_model_len: options.MaxModelLen = None,
    max_batched_tokens: options.MaxBatchedTokens = None,
    block_size: options.BlockSize = 16,
    kv_blocks: Annotated[int | None, typer.Option(min=0, help="Blocks of the KV cache.")] = None,
    kv_cache_memory: options.KVCacheMemory = None,
    memory_fraction: options.MemoryFraction = 0.9,
    prefix_cache: options.PrefixCache = True,
    no_graphs: options.NoGraphs = False,
) -> None:
    """Answer prompts: from arguments, a file or standard input."""

    def command(console: Console) -> int:
        from tinyvllm_cli.commands.generate import GenerateOptions, run
        from tinyvllm_cli.render.generate import GenerateView, TableView

        if table and (stream or json or output):
            raise UserError(
                "--table cannot go with --stream, --json or --output", fix="Use one of them.", exit_code=ExitCode.USAGE
            )
        if stream and (json or output or order is Order.FINISHED):
            raise UserError(
                "--stream shows texts in the order of the input; --json, --output and --order finished do not",
                fix="Use one of them.",
                exit_code=ExitCode.USAGE,
            )
        sampling = {
            "n": n,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "stop": stop,
            "stop_token_ids": stop_token_ids,
            "ignore_eos": ignore_eos,
            "logprobs": logprobs,
        }
        generate_options = GenerateOptions(
            prompts=tuple(prompts or ()),
            prompts_file=prompts_file,
            prompts_format=prompt_format.value,
            whole_file=whole_file,
            model=model,
            raw=raw,
            sampling={name: value for name, value in sampling.items() if value is not None},
            greedy=greedy,
            output=output,
            order=order.value,
            resume=resume,
            overwrite=overwrite,
            engine={
                "device": device.value,
                "dtype": dtype.value,
                "max_num_seqs": max_num_seqs,
                "max_model_len": max_model_len,
                "max_batched_tokens": max_batched_tokens,
                "block_size": block_size,
                "num_kv_blocks": kv_blocks,
                "kv_cache_memory": kv_cache_memory,
                "memory_fraction": memory_fraction,
                "prefix_cache": prefix_cache,
                "graphs": not no_graphs,
            },
        )
        resume_command = shlex.join(["tinyvllm", *sys.argv[1:], *([] if resume else ["--resume"])])
        view = TableView if table else GenerateView
        return run(generate_options, view(console, stream, resume_command)).exit_code

    _run(command, json, quiet)


@app.command()
def bench(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="DIR", help="Model folder. Default: random weights; on a CPU the demo."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="NAME", help="Random weights: 1B, 3B, 8B, SmolLM2-135M, ..., a config.json.")
    ] = None,
    prompt_tokens: Annotated[
        str | None, typer.Option("--prompt-tokens", "-p", metavar="N,...", help="Prompt lengths; 0: no prefill tests.")
    ] = None,
    generate_tokens: Annotated[
        str | None, typer.Option("--generate-tokens", "-n", metavar="N,...", help="Decode steps; 0: no decode tests.")
    ] = None,
    batch: Annotated[str | None, typer.Option("--batch", "-b", metavar="N,...", help="Prompts at once.")] = None,
    depth: Annotated[
        str | None, typer.Option("--depth", "-d", metavar="N,...", help="Tokens in the cache before each test.")
    ] = None,
    repetitions: Annotated[int | None, typer.Option("--repetitions", "-r", min=1, help="Samples of each row.")] = None,
    workload: Annotated[
        str | None,
        typer.Option(metavar="nano|prefix|64+8192|FILE", help="A job: mixed, alike, a late long prompt; JSONL."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests of the workload arrive so many a second.")] = None,
    suite: Annotated[str | None, typer.Option(metavar="targets", help="The project's targets as the tests.")] = None,
    only: Annotated[str | None, typer.Option(metavar="WORD,...", help="Only the suite's rows of such a name.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Every op alone, at the shapes of the tests.")] = False,
    stages: Annotated[bool, typer.Option("--stages", help="The stages of the fused decode step.")] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="PEER,...", help="The same work by transformers, transformers-static, vllm.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Show the change against an earlier run's --json.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Write the roofline as an SVG image.")] = None,
    no_warmup: Annotated[bool, typer.Option("--no-warmup", help="Leave out the run before the samples.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the random prompts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="One line a result.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables for a README.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
    device: Annotated[Device, typer.Option("--device", help="Where to compute.")] = Device.AUTO,
    dtype: Annotated[DType, typer.Option("--dtype", help="Of weights, activations and cache.")] = DType.AUTO,
    max_num_seqs: options.MaxNumSeqs = None,
    max_batched_tokens: options.MaxBatchedTokens = None,
    block_size: options.BlockSize = 16,
    kv_cache_memory: Annotated[
        int | None, typer.Option(parser=parse_bytes, metavar="SIZE", help="Memory of the KV cache. Default: ample.")
    ] = None,
    prefix_cache: options.PrefixCache = False,
    no_graphs: options.NoGraphs = False,
) -> None:
    """Measure prefill, decode and whole jobs, beside what this machine can do."""

    def command(console: Console) -> int:
        from tinyvllm_cli.commands.bench import BenchOptions, run
        from tinyvllm_cli.render.bench import BenchView, check_plot, pick_form, show, write_plot

        form = pick_form(json=json, csv=csv, markdown=markdown)
        if plot:
            check_plot(plot)
        options = BenchOptions(
            model=model,
            shape=shape,
            prompts=parse_counts(prompt_tokens, "-p"),
            generated=parse_counts(generate_tokens, "-n"),
            batches=parse_counts(batch, "-b", 1),
            depths=parse_counts(depth, "-d"),
            repetitions=repetitions,
            workload=workload,
            rate=rate,
            suite=suite,
            only=parse_words(only, "--only"),
            kernels=kernels,
            stages=stages,
            compare=parse_words(compare, "--compare"),
            baseline=baseline,
            warmup=not no_warmup,
            seed=seed,
            device=device.value,
            dtype=dtype.value,
            engine={
                "max_num_seqs": max_num_seqs,
                "max_batched_tokens": max_batched_tokens,
                "block_size": block_size,
                "kv_cache_memory": kv_cache_memory,
                "prefix_cache": prefix_cache,
                "graphs": not no_graphs,
            },
        )
        result = run(options, BenchView(console))
        show(result, console, form)
        if plot:
            write_plot(result, plot)
        return result.exit_code

    _run(command, json, quiet)


def _run(command: Callable[[Console], int], json: bool, quiet: bool) -> NoReturn:
    """Runs a command and leaves with its exit code; what the user can mend is shown without a traceback."""
    from tinyvllm_cli.commands.interrupt import leaving_at_once
    from tinyvllm_cli.render.console import Console

    console = Console("json" if json else "human", quiet=quiet)
    try:
        with leaving_at_once(lambda: console.note("interrupted")):
            code = command(console)
    except BrokenPipeError:
        code = 128 + signal.SIGPIPE  # the reader, such as `head`, has what it wanted: end as quietly as a signal would
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UserError, OSError) as error:
        console.error(as_user_error(error))
        code = as_user_error(error).exit_code
    raise typer.Exit(code)


def main(arguments: list[str] | None = None) -> Any:
    """Parses and runs; leaves by SystemExit."""
    app(args=arguments, prog_name="tinyvllm")
