"""The [checkpoint] section: where and when a run saves, and what it loads."""

from typing import Annotated, Literal

from pydantic import Field

from titanlite.config.needs import IN_BUCKET, LOADING, PINNED, VERIFIABLE
from titanlite.config.section import Natural, Needs, NonNegative, Positive, Seconds, Section

_UPLOADS = Needs("checkpoint.enable", IN_BUCKET)


class Checkpoint(Section):
    """Saving and loading."""

    needs = Needs("checkpoint.enable")
    enable: bool = False
    """Save checkpoints, and resume from them."""
    folder: str = "checkpoint"
    """Folder inside job.dump_folder, or URL (s3://, gs:// or az://BUCKET/FOLDER)."""
    interval: Literal["auto"] | Positive = 500
    """Steps between checkpoints. "auto": the interval that loses the least time, by the cost of a
    save and fault.mtbf_hours, checked at logged steps."""
    interval_minutes: NonNegative = 0.0
    """Maximum minutes between checkpoints, checked at logged steps; 0 means no limit."""
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"], Needs("checkpoint.enable", PINNED)
    ] = "disabled"
    """disabled: block until written; async: copy, then write in the background;
    async_with_pinned_mem: also copy in the background, into page-locked memory, before the next
    optimizer step (GPU only)."""
    keep_latest_k: Natural = 10
    """Number of resumable checkpoints to keep; 0 keeps all."""
    keep_every: Annotated[Natural, Needs("checkpoint.enable", "checkpoint.keep_latest_k")] = 0
    """Keep checkpoints at multiples of this step forever; 0 keeps none."""
    after_save: str = ""
    """Shell command to run on node 0 after each save; {checkpoint} stands for what was saved. It
    runs in parallel with training, one at a time, and skips all but the newest of the saves in the
    meantime."""
    upload_parallel: Annotated[Positive, _UPLOADS] = 4
    """Parts that a rank uploads at once."""
    part_mib: Annotated[int, Field(ge=5, le=5120), _UPLOADS] = 64
    """Size of a part in MiB; larger if a file would have more than 9,000 parts."""
    stall_timeout_seconds: Annotated[Seconds, _UPLOADS] = 120
    """Time after which an unanswered part is sent again; uploading upload_parallel x part_mib must
    take less."""
    load_step: Annotated[
        Literal[-1] | Natural, Needs("checkpoint.enable", why="nothing is resumed")
    ] = -1
    """Step to resume from; -1 means the latest complete checkpoint."""
    initial_load_path: Annotated[str, Needs()] = ""
    """Checkpoint, folder of checkpoints or dump folder to start from if there is nothing to resume;
    may be a URL, or TorchTitan's."""
    initial_load_in_hf: Annotated[
        bool, Needs("checkpoint.initial_load_path", why="nothing is loaded")
    ] = False
    """initial_load_path is a folder in Hugging Face's format; implied where model.flavor = "hf"
    reads it."""
    initial_load_model_only: Annotated[bool, Needs("checkpoint.initial_load_path")] = True
    """Load only the weights from initial_load_path."""
    exclude_from_loading: Annotated[list[str], Needs(LOADING)] = []
    """Allowed differences from the checkpoint: patterns of names ("optimizer", "model.output.*", or
    a field of the model, "model.overrides.rope_theta"), or "data" for the position in the data."""
    last_save_model_only: bool = False
    """Save only the weights in the last checkpoint."""
    last_save_in_hf: Annotated[bool, Needs("checkpoint.enable", why="nothing is saved")] = False
    """Also write the last weights in Hugging Face's format, to hf-step-N next to the
    checkpoints.
    """
    export_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights exported by last_save_in_hf or `titanlite checkpoint export`."""
    enable_first_step_checkpoint: bool = False
    """Also save after the first step."""
    on_failure: Literal["stop", "warn"] = "stop"
    """After a failed save, or if the disk has no room for metrics: stop the run, or warn and
    continue."""
    verify_on_load: Annotated[Literal["full", "sizes"], Needs(VERIFIABLE)] = "full"
    """Checks before loading: checksums of all files, or sizes and the checksums of small files."""
