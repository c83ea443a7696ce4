"""What a user names -> OpGraph and Job: a model, a factory of their own, or a file.

The name of a known model wins over a file of that name (write ``./vgg16`` for the file); what is
not a file and has a colon is a factory. Graph files are told apart by what is in them, never by
their name.
"""

import difflib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from simcore.errors import GraphError, JobError, UsageError
from simcore.frontends.dnn_partitioning import decode_partitioning
from simcore.frontends.files import decode_text, read_bytes
from simcore.frontends.hlo import decode_step, is_hlo
from simcore.frontends.pipedream import decode_profile
from simcore.graph import OpGraph
from simcore.graph_file import FORMAT, decode_graph
from simcore.job import Job
from simcore.models import build, model_names, model_spec

_PROFILE_MARK = b"forward_compute_time="
_HEAD = 2**16  # bytes looked at to tell text formats apart
_BOM = b"\xef\xbb\xbf"
_ONNX_MARK = b"\x08"  # the field ir_version, with which a model of ONNX begins
_SUFFIXES = (".txt", ".json", ".hlo", ".mlir", ".onnx")


def load_graph(
    source: str, changes: Mapping[str, Any] | None = None, *, trusted: bool = True
) -> tuple[OpGraph, Job, str]:
    """Returns the graph a user names, and the job it is for.

    Args:
        source: a model's name, ``package.module:factory`` or the path of a graph file.
        changes: fields of the job that differ from the source's own.
        trusted: whether a factory may be imported and called; False where the source was read
            from a data file, from which nothing is executed.

    Returns:
        (graph, job, source): the last finds the graph again.

    Raises:
        GraphError: there is no such model or file, or the file is malformed.
        CaptureError: the model cannot be captured.
        JobError: the job is not possible for this source.
        UsageError: a factory from an untrusted source.
    """
    changes = dict(changes or {})
    if source in model_names():
        graph, job = _named(source, changes)
    elif is_file(source):
        graph, job = read_step_file(source, changes)
    elif is_captured(source):
        if not trusted:
            raise UsageError(
                f"the graph comes from your own code, {source}, which is not run because a file "
                f"says so; name it again: --graph {source}"
            )
        graph, job = _made(source, changes)
    else:
        raise GraphError(_unknown(source))
    return graph, job, source


def is_file(source: str) -> bool:
    """Returns whether a source is taken as the path of a file."""
    if not source or "\0" in source or source in model_names():
        return False
    path = Path(source)
    return "/" in source or path.suffix in _SUFFIXES or path.exists()


def is_captured(source: str) -> bool:
    """Returns whether a source is a model or a factory, whose capture takes seconds."""
    return source in model_names() or (":" in source and not is_file(source))


def read_graph_file(path: str | Path) -> OpGraph:
    """Returns the graph of a file, whichever of the known formats it has.

    Raises:
        GraphError: the file cannot be read, has no known format or breaks it.
    """
    return read_step_file(path)[0]


def read_step_file(
    path: str | Path, changes: Mapping[str, Any] | None = None
) -> tuple[OpGraph, Job]:
    """Returns the graph of a file and its job.

    Args:
        path: of the file.
        changes: fields of the job that differ from the file's own.

    Raises:
        GraphError: as `read_graph_file`.
        JobError: the job is not possible for this file.
    """
    changes = dict(changes or {})
    source = str(path)
    content = read_bytes(path).removeprefix(_BOM)
    if content.startswith(_ONNX_MARK):
        from simcore.frontends.torch_onnx import decode_onnx

        return decode_onnx(content, source, changes)
    if "sequence_length" in changes:
        raise JobError(f"{source}: the sequence length of a graph file cannot be changed")
    if content.lstrip()[:1] in (b"{", b"["):
        return _measured(_from_json(content, source), changes)
    if _PROFILE_MARK in content[:_HEAD]:
        return _measured(decode_profile(decode_text(content, source), source), changes)
    if is_hlo(content[:_HEAD].decode("utf-8", "replace")):
        graph, job = decode_step(decode_text(content, source), source)
        return graph, _changed_step(graph, job, changes, source)
    raise GraphError(
        f"{source}: not a graph file: neither PipeDream's graph.txt nor dnn-partitioning JSON nor "
        f"{FORMAT} nor HLO or StableHLO text nor ONNX"
    )


class _Tag(msgspec.Struct):
    """The fields that tell JSON formats apart."""

    format: str | None = None
    nodes: msgspec.Raw = msgspec.Raw()


def _from_json(content: bytes, source: str) -> OpGraph:
    try:
        tag = msgspec.json.decode(content, type=_Tag)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise GraphError(f"{source}: not a graph: {error}") from None
    except RecursionError:
        raise GraphError(f"{source}: JSON nested too deeply") from None
    if tag.format is not None:
        return decode_graph(content, source)
    if tag.nodes:
        return decode_partitioning(content, source)
    raise GraphError(f'{source}: not a graph: neither "format" nor "nodes" at the top level')


def _measured(graph: OpGraph, changes: Mapping[str, Any]) -> tuple[OpGraph, Job]:
    return graph, Job(batch=graph.batch).replace(**changes)


def _changed_step(graph: OpGraph, job: Job, changes: Mapping[str, Any], source: str) -> Job:
    """Returns the job of a file that is a whole training step, with what may differ from it."""
    changed = job.replace(**changes)
    if changed.precision != job.precision:
        raise JobError(
            f"{source}: its dtypes are those of {job.precision}; a file cannot be converted"
        )
    if changed.batch != job.batch and not graph.tensor_bytes[:, 1].any():
        raise JobError(f"{source}: the batch of {job.batch} is fixed: no size grows with it")
    return changed


def _named(source: str, changes: dict[str, Any]) -> tuple[OpGraph, Job]:
    job = model_spec(source).default_job.replace(**changes)
    built = build(source, job)
    return _captured(built.module, built.inputs, job, source), job


def _made(source: str, changes: dict[str, Any]) -> tuple[OpGraph, Job]:
    job = Job().replace(**changes)
    from simcore.frontends.torch_capture import load_factory

    graph = _captured(load_factory(source), None, job, source)
    return graph, job if job.batch else job.replace(batch=graph.batch)


def _captured(model: Any, inputs: Any, job: Job, source: str) -> OpGraph:
    from simcore.frontends.torch_capture import capture_report

    graph, report = capture_report(model, inputs, job, name=source)
    if missing := report.missing_gradients:
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        warnings.warn(
            f"{source}: {len(missing)} trainable parameters get no gradient from the loss and are "
            f"not updated: {names}",
            stacklevel=2,
        )
    return graph


def _unknown(source: str) -> str:
    names = model_names()
    close = difflib.get_close_matches(source.lower().replace("_", "-"), names, n=2)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{source!r} is neither a model nor a file{hint} (models: {', '.join(names)})"
