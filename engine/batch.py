"""What every layer may read of the step being computed."""

from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class ForwardBatch:
    """One step's tokens packed flat, sequence after sequence, with no padding between them.

    Sequences with exactly one query token come first: `num_decodes` of them.
    """

    token_ids: torch.Tensor
    """[num_tokens] int64."""
    positions: torch.Tensor
    """[num_tokens] int64, each token's place in its sequence."""
    slots: torch.Tensor
    """[num_tokens] int64: block_id * block_size + offset, where each token's KV goes."""
    query_start_loc: list[int]
    """[num_seqs + 1], host: sequence i's queries are rows query_start_loc[i] .. query_start_loc[i + 1]."""
    seq_lens: list[int]
    """[num_seqs], host: KV length of each sequence after this step."""
    block_tables: list[list[int]]
    """[num_seqs], host: each at least ceil(seq_len / block_size) long."""
    num_decodes: int
    sample_rows: torch.Tensor
    """[num_samples] int64: the rows whose logits are wanted, in the plan's order."""
    prompt_rows: torch.Tensor | None = None
    """[n] int64: further rows, whose logits tell of a prompt's next tokens; None: there are none."""
    prepared: dict[tuple[object, ...], object] = field(default_factory=dict)
    """What a layer works out from the fields above once a step, for all layers of its kind, by a name of its own."""

    @property
    def output_rows(self) -> torch.Tensor:
        """Those that the last layer goes on with: sample_rows, then prompt_rows."""
        return self.sample_rows if self.prompt_rows is None else torch.cat((self.sample_rows, self.prompt_rows))


@dataclass(slots=True)
class DeviceBatch:
    """One step's tokens packed flat, with nothing that the host would have to know: a captured graph can read it again.

    The sizes are those of the graph. Sequences behind the last have no query tokens; rows behind the last token are
    computed like the others, write to block 0, and nobody looks at them.
    """

    token_ids: torch.Tensor
    """[num_tokens] int32."""
    positions: torch.Tensor
    """[num_tokens] int32, each token's place in its sequence."""
    slots: torch.Tensor
    """[num_tokens] int32: block_id * block_size + offset, where each token's KV goes."""
    query_start_loc: torch.Tensor
    """[num_seqs + 1] int32: sequence i's queries are rows query_start_loc[i] .. query_start_loc[i + 1]."""
    seq_lens: torch.Tensor
    """[num_seqs] int32: KV length of each sequence after this step."""
    seq_slots: torch.Tensor
    """[num_seqs] int32: each sequence's row in the tables that outlive the step."""
    block_tables: torch.Tensor
    """[max_num_seqs, most blocks] int32, by seq_slot."""
    has_long: bool
    """Whether a sequence may have more than a few query tokens. False: each has one, or none."""
