"""Latency models that have been measured, kept in files: by what they were measured on.

A file is JSON: a format version, the key, the model's error, and the model. ``tidegate profile --out`` writes the same.
"""

import functools
import hashlib
import importlib.metadata
import logging
import os
import tempfile
from pathlib import Path

import msgspec

from tidegate.base.errors import ConfigError
from tidegate.base.specs import ModelSpec
from tidegate.base.stats import PredictionError
from tidegate.node.calibrate import Measured
from tidegate.slo.latency import Costs, Division, LatencyModel
from tidegate.slo.latency_file import FORMAT, read_latency_model

log = logging.getLogger("tidegate.node")

# Code that decides how long a step takes, and how that is measured.
IN_STEPS = (
    "kernels/**/*.py", "models/**/*.py", "runner/**/*.py", "device/**/*.py",
    "node/measure.py", "node/probes.py", "node/calibrate.py",
)  # fmt: skip


@functools.cache
def code() -> str:
    """A digest of Tidegate's code that runs in steps, and that measures them: with a faster kernel, what was measured
    before is wrong."""
    package = Path(__file__).parent.parent
    files = sorted(path for pattern in IN_STEPS for path in package.glob(pattern))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


class Key(msgspec.Struct, frozen=True):
    """A model measured on one of these tells nothing about another."""

    model: ModelSpec
    quantization: str | None
    kv_dtype: str
    device: str  # with its number of cores; a GPU's name says its SMs
    processor: str
    sharing: str
    lanes: dict[str, str]  # name and phases: what has been measured at all
    max_num_seqs: int
    block_size: int
    torch: str = msgspec.field(default_factory=lambda: importlib.metadata.version("torch"))
    code: str = msgspec.field(default_factory=code)


class Record(msgspec.Struct, frozen=True):
    """A file's content: besides what tells of the measurement, the fields of a ``LatencyModel``, so that it is one."""

    format: int
    key: Key
    samples: int
    unseen: int
    error: PredictionError
    by_kind: dict[str, PredictionError]
    whole: Costs
    divisions: tuple[Division, ...]

    @classmethod
    def of(cls, key: Key, measured: Measured) -> "Record":
        m, model = measured, measured.model
        return cls(FORMAT, key, m.samples, m.unseen, m.error, m.by_kind, model.whole, model.divisions)

    @property
    def measured(self) -> Measured:
        model = LatencyModel(self.whole, self.divisions)
        return Measured(model, self.samples, self.unseen, self.error, self.by_kind)


def folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "tidegate" / "latency"


def path_of(key: Key) -> Path:
    return folder() / f"{hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:24]}.json"


def cached(key: Key) -> Measured | None:
    """What was measured before on the same. A file that can't be used is ignored, with a line in the log."""
    path = path_of(key)
    try:
        record = read(path)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        log.warning("a kept latency model is ignored: %s", error)
        return None
    if record.key != key:
        log.warning("a kept latency model is ignored: %s is of something else", path)
        return None
    return record.measured


def keep(key: Key, measured: Measured) -> None:
    """For the next start. Where that fails there is a line in the log, and no harm."""
    try:
        write(path_of(key), key, measured)
    except OSError as error:
        log.warning("the latency model could not be kept: %s", error)


def write(path: Path, key: Key, measured: Measured) -> None:
    """All of it or nothing, whoever reads or writes at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = msgspec.json.format(msgspec.json.encode(Record.of(key, measured)), indent=1)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, suffix=".new", delete=False) as file:
        try:
            file.write(body)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def read(path: Path) -> Record:
    """Raises FileNotFoundError, OSError, or ConfigError for what is no such file."""
    body = path.read_bytes()
    try:
        version = msgspec.json.decode(body, type=_Versioned).format
        if version != FORMAT:
            raise ConfigError(f"{path} has format {version}, not {FORMAT}: measure again")
        return msgspec.json.decode(body, type=Record)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is not a latency model: {error}") from error


def given(path: Path) -> tuple[LatencyModel, str]:
    """A latency model that somebody names, measured on whatever, and what is known of it. Raises ConfigError."""
    model = read_latency_model(path)
    try:
        return model, str(read(path).measured)
    except ConfigError:  # it does not say how it was measured
        return model, str(path)


class _Versioned(msgspec.Struct):
    format: int


def processor() -> str:
    """The CPU's name, "" where the system does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
