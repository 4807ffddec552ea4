"""What an executor does beside its steps, on any device: grammars, and KV blocks in host memory and on disk."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from engine.execution.disk_store import DiskStore
from engine.execution.grammar import GrammarCompiler, read_tokenizer
from engine.execution.kv_cache import GIB
from engine.execution.offload import BlockCopier, HostMemory, Offload
from engine.execution.sequence_grammars import SequenceGrammars
from engine.executor import ReportProgress
from engine.models.config import ModelConfig
from engine.models.fingerprint import fingerprint
from engine.transfer import StoredBlock, Transfer, TransferResult
from streamkv.config import EngineConfig
from streamkv.model_files import ModelFiles
from streamkv.sampling import Grammar


class BesideSteps:
    """Made before a model is loaded; then its parts begin one by one. Whoever makes it closes it."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises ConfigError for a disk_kv_path that is wrong: before the weights, which take long."""
        self._config = config
        self._store = DiskStore(config.disk_kv_path) if config.disk_kv_path else None
        self._offload: Offload | None = None
        self._compiler: GrammarCompiler | None = None
        self._grammars: SequenceGrammars | None = None

    @property
    def grammars(self) -> SequenceGrammars:
        """Where each sequence stands in its grammar; from `begin_grammars` on."""
        assert self._grammars is not None, "load comes first"
        return self._grammars

    def begin_grammars(self, files: ModelFiles, model: ModelConfig, num_threads: int = 1) -> None:
        """num_threads: for the masks of one step. The tokenizer is read when the first grammar comes."""
        self._compiler = GrammarCompiler(partial(read_tokenizer, files, model.vocab_size, model.eos_token_ids))
        self._grammars = SequenceGrammars(self._compiler, model.vocab_size, num_threads)

    def open_disk(
        self,
        files: ModelFiles,
        model: ModelConfig,
        placing: Iterable[str],
        block_bytes: int,
        num_threads: int,
        report: ReportProgress,
    ) -> tuple[int, list[StoredBlock]]:
        """→ (blocks that the disk may hold, those that it holds). placing: see fingerprint. num_threads: to hash the
        weights. Raises ConfigError or ModelError."""
        if self._store is None:
            return 0, []
        bound_to = fingerprint(files, model, placing, num_threads, report)
        size_bytes = int(self._config.disk_kv_size_gib * GIB)
        return self._store.open(bound_to, self._config.block_size, block_bytes, size_bytes, report)

    def begin_offload(self, host: HostMemory, copier: BlockCopier, num_blocks: int) -> float:
        """Make ready for transfers → the speed of copies between device and host memory, bytes a second. num_blocks:
        of the pool."""
        self._offload = Offload(host, copier, self._store)
        return self._offload.measure_bytes_per_s(num_blocks)

    def start_transfer(self, transfer: Transfer, on_done: Callable[[], None]) -> None:
        """As Executor.start_transfer; see Offload.start for when it may be called."""
        assert self._offload is not None, "there is no host tier"
        self._offload.start(transfer, on_done)

    def finished_transfers(self) -> list[TransferResult]:
        """As Executor.finished_transfers."""
        return [] if self._offload is None else self._offload.take_finished()

    def compile_grammar(self, grammar: Grammar, on_done: Callable[[], None]) -> Future[object]:
        """As Executor.compile_grammar."""
        assert self._compiler is not None, "load comes first"
        compiled = self._compiler.compile(grammar)
        compiled.add_done_callback(lambda _: on_done())
        return compiled

    def close(self) -> bool:
        """Waits for the block that is being copied, and for what is being written to disk → whether they have ended:
        see Offload.close. Idempotent."""
        if self._compiler is not None and self._grammars is not None:
            self._compiler.close()
            self._grammars.close()
            self._compiler = self._grammars = None
        has_ended = self._offload is None or self._offload.close()
        self._offload = None
        if self._store is not None and has_ended:
            self._store.close()
        self._store = None
        return has_ended
