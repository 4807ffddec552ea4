"""What changes the logits of running sequences, kept on the device: biases, token counts, bans. By seq_slot.

Each table is allocated when the first sequence needs it. All copies are queued on the current stream, in front of the
step that reads them and behind those that still read what they overwrite.
"""

from collections import Counter

import torch

from engine.execution.device_copies import to_device
from engine.execution.token_masks import WORD_BITS, TokenMasks
from engine.kernels.logit_changes import add_biases, ban_tokens, count_tokens, mask_logits, penalise
from engine.plan import NewSequence
from streamkv.sampling import MAX_LOGIT_BIASES

_FIRST_BANS = 256
"""End-of-sequence and stop ids of a sequence for which there is room at first: of almost every model."""
_FIRST_COUNT_ROWS = 8


class DeviceChanges:
    """Biases, counts and bans of the sequences that have a slot."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._max_num_seqs = max_num_seqs
        self._vocab_size = vocab_size
        self._device = device
        self._bias_ids: torch.Tensor | None = None
        self._biases: torch.Tensor | None = None
        self._ban_ids: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None
        self._free_rows: list[int] = []
        self._nothing = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)

    def set_biases(self, seq_slot: int, logit_bias: dict[int, float]) -> None:
        """Raises ValueError for more of them than a request may have."""
        if len(logit_bias) > MAX_LOGIT_BIASES:
            raise ValueError(f"logit_bias takes at most {MAX_LOGIT_BIASES} ids, got {len(logit_bias)}")
        if self._bias_ids is None or self._biases is None:
            shape = (self._max_num_seqs, MAX_LOGIT_BIASES)
            self._bias_ids = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._biases = torch.zeros(shape, dtype=torch.float32, device=self._device)
        self._bias_ids[seq_slot, : len(logit_bias)] = self._ids(list(logit_bias))
        biases = torch.tensor(list(logit_bias.values()), dtype=torch.float32)
        self._biases[seq_slot, : len(logit_bias)] = to_device(biases, self._device)

    def set_bans(self, seq_slot: int, token_ids: set[int]) -> int:
        """→ how many there are: those outside the vocabulary are left out."""
        banned = sorted(token_id for token_id in token_ids if token_id < self._vocab_size)
        if banned:
            if self._ban_ids is None or self._ban_ids.shape[1] < len(banned):
                self._grow_bans(len(banned))
            assert self._ban_ids is not None
            self._ban_ids[seq_slot, : len(banned)] = self._ids(banned)
        return len(banned)

    def take_counts(self, facts: NewSequence, output_ids: list[int]) -> int:
        """→ the row that counts this sequence's tokens, until `give_back`."""
        if not self._free_rows:
            self._grow_counts()
        assert self._counts is not None
        row = self._free_rows.pop()
        counts = dict.fromkeys(facts.token_ids[: facts.num_prompt], 1)
        for token_id, num in Counter(output_ids).items():
            counts[token_id] = counts.get(token_id, 0) + 2 * num
        self._counts[row].zero_()
        values = torch.tensor(list(counts.values()), dtype=torch.int32)
        self._counts[row].index_copy_(0, self._ids(list(counts)).long(), to_device(values, self._device))
        return row

    def give_back(self, row: int) -> None:
        self._free_rows.append(row)

    def mask(self, logits: torch.Tensor, masks: TokenMasks) -> None:
        """logits: [n, vocab_size], changed in place. Rows that have failed stay as they are."""
        places = [place for place, row in enumerate(masks.rows) if row not in masks.failed]
        rows = self._ids([masks.rows[place] for place in places])
        mask_logits(logits, rows, to_device(masks.bits[places], self._device))

    def add_biases(self, logits: torch.Tensor, seq_slots: torch.Tensor, settings: torch.Tensor) -> None:
        assert self._bias_ids is not None and self._biases is not None
        add_biases(logits, seq_slots, settings, self._bias_ids, self._biases)

    def penalise(self, logits: torch.Tensor, seq_slots: torch.Tensor, settings: torch.Tensor) -> None:
        assert self._counts is not None
        penalise(logits, seq_slots, settings, self._counts)

    def count(self, token_ids: torch.Tensor, seq_slots: torch.Tensor, settings: torch.Tensor) -> None:
        assert self._counts is not None
        count_tokens(token_ids, seq_slots, settings, self._counts)

    def ban(
        self,
        logits: torch.Tensor,
        seq_slots: torch.Tensor,
        positions: torch.Tensor,
        settings: torch.Tensor,
        exempt_rows: set[int],
    ) -> None:
        """exempt_rows: those that can only end."""
        if self._ban_ids is None:
            return
        exempt = self._nothing
        if exempt_rows:
            flags = torch.zeros(len(logits), dtype=torch.int32)
            flags[list(exempt_rows)] = 1
            exempt = to_device(flags, self._device)
        ban_tokens(logits, seq_slots, positions, exempt, settings, self._ban_ids)

    def compile(self, logits: torch.Tensor, padding: torch.Tensor, settings: torch.Tensor) -> None:
        """Launch each kernel once over rows of padding. logits: [n, vocab_size]; padding: [n] int32, all under 0."""
        ids = torch.zeros(1, MAX_LOGIT_BIASES, dtype=torch.int32, device=self._device)
        bans = torch.zeros(1, _FIRST_BANS, dtype=torch.int32, device=self._device)
        counts = torch.zeros(1, self._vocab_size, dtype=torch.int32, device=self._device)
        bits = torch.full((1, -(-self._vocab_size // WORD_BITS)), -1, dtype=torch.int32, device=self._device)
        mask_logits(logits, ids[0, :1], bits)
        add_biases(logits, padding, settings, ids, ids.float())
        penalise(logits, padding, settings, counts)
        count_tokens(padding, padding, settings, counts)
        ban_tokens(logits, padding, padding, self._nothing, settings, bans)

    def _ids(self, token_ids: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(token_ids, dtype=torch.int32), self._device)

    def _grow_bans(self, num_bans: int) -> None:
        """How many there can be is the model's matter: it may have any number of end-of-sequence ids."""
        width = -(-num_bans // _FIRST_BANS) * _FIRST_BANS
        grown = torch.zeros(self._max_num_seqs, width, dtype=torch.int32, device=self._device)
        if self._ban_ids is not None:
            grown[:, : self._ban_ids.shape[1]] = self._ban_ids
        self._ban_ids = grown

    def _grow_counts(self) -> None:
        num_rows = 0 if self._counts is None else len(self._counts)
        # No more than there are sequences: a row has the size of the vocabulary.
        grown = min(max(_FIRST_COUNT_ROWS, 2 * num_rows), self._max_num_seqs)
        counts = torch.zeros(grown, self._vocab_size, dtype=torch.int32, device=self._device)
        if self._counts is not None:
            counts[:num_rows] = self._counts
        self._counts = counts
        self._free_rows += range(num_rows, grown)
