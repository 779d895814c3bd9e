#!/usr/bin/env python
"""`python zero_to_torch.py CHECKPOINT OUT --dtype bf16`: weights of a checkpoint in a dtype of choice.

`save_checkpoint` copies this file beside the checkpoint. There it uses the zero_to_fp32.py that lies with it.
"""

from __future__ import annotations

import argparse

if __package__:
    from . import zero_to_fp32
else:
    import zero_to_fp32  # type: ignore[import-not-found,no-redef]


def main(args: list[str] | None = None) -> None:
    """Convert as the command line says.

    Args:
        args: the arguments; None: those of the process.
    """
    parser = argparse.ArgumentParser(
        description="Writes the weights of a checkpoint as torch files."
    )
    parser.add_argument("checkpoint_dir", help="the folder that holds `latest` and the tags")
    parser.add_argument("output_dir", help="the folder to write")
    parser.add_argument("--dtype", required=True, choices=sorted(zero_to_fp32.OUTPUT_DTYPE_NAMES))
    parser.add_argument("--max_shard_size", default="5GB", help="of one file, such as 500MB")
    parser.add_argument("--safe_serialization", action="store_true", help="write safetensors")
    parser.add_argument("-t", "--tag", help="default: the one in `latest`")
    parser.add_argument("--exclude_frozen_parameters", action="store_true")
    parser.add_argument("-d", "--debug", action="store_true", help="without effect")
    given = parser.parse_args(args)
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(
        given.checkpoint_dir,
        given.output_dir,
        dtype=given.dtype,
        max_shard_size=given.max_shard_size,
        safe_serialization=given.safe_serialization,
        tag=given.tag,
        exclude_frozen_parameters=given.exclude_frozen_parameters,
    )


if __name__ == "__main__":
    main()
