"""Command line: ``python -m megatron.packed_rope <command>``.

Exit codes: 0 right or done, 1 something is wrong or was refused, 2 could not run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import __version__
from .errors import PackedRopeError, PatchRefused

COULD_NOT_RUN = 2


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        code = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except PatchRefused as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    except PackedRopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return COULD_NOT_RUN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron.packed_rope",
        description="Makes packed (THD) RoPE right in the installed Megatron-Core.",
        epilog="Exit codes: 0 right or done, 1 something is wrong or was refused, 2 could not run.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(run.__name__.strip("_"), help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    for run, text in (
        (_check, "Run the Megatron-Core that Python imports against an oracle."),
        (_status, "Say what is patched, what is not, and what changed since."),
        (_apply, "Patch the installed Megatron-Core, or a checkout, on disk."),
        (_revert, "Take the patch out again, byte for byte."),
        (_diff, "Print what apply would change, as a diff that git apply takes."),
    ):
        sub = command(run, text)
        sub.add_argument("--tree", type=Path, metavar="DIR", help="a checkout with megatron/core")
        if run in (_check, _status):
            sub.add_argument("--json", action="store_true", help="machine-readable output")
        if run is _apply:
            sub.add_argument(
                "--force",
                action="store_true",
                help="patch unknown definitions too; undone if a right case of check turns wrong",
            )
        if run is _status:
            sub.add_argument(
                "--import",
                dest="imports",
                action="append",
                default=[],
                metavar="MODULE",
                help="import this first, as your script does, and say what is bound then "
                "(repeatable); shows patches that a framework binds over this one",
            )
    _add_other_commands(command)
    return parser


def _add_other_commands(command: Callable[..., argparse.ArgumentParser]) -> None:
    sub = command(_wheel, "Repack a Megatron-Core wheel with the patch in it.")
    sub.add_argument("wheel", type=Path, help="a megatron_core wheel")
    sub.add_argument("-o", "--out", type=Path, default=Path("dist"), help="folder (dist)")
    from .show import add_arguments

    text = "Draw which row of freqs every token reads, in upstream and as it should be."
    add_arguments(command(_show, text))


def _check(arguments: argparse.Namespace) -> int:
    if arguments.tree is not None:
        from .binding.forced import check_tree

        report = check_tree(arguments.tree)
    else:
        from .binding.tree import find_tree

        find_tree()  # a typed error before anything is imported
        try:
            from .check import run
        except ImportError as error:
            print(f"error: check needs torch: {error}", file=sys.stderr)
            return COULD_NOT_RUN
        report = run()
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        from .check import table

        print(table(report))
    return 0 if report["counts"]["wrong"] + report["counts"]["raises"] == 0 else 1


def _status(arguments: argparse.Namespace) -> int:
    from .binding.disk import status

    for name in arguments.imports:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"error: cannot import {name}: {error}", file=sys.stderr)
            return COULD_NOT_RUN
    report = status(arguments.tree)
    if arguments.json:
        print(json.dumps(report, indent=1))
    else:
        print(f"Megatron-Core {report['megatron_core']}: {report['state']} on disk")
        for file in report["files"]:
            print(
                f"  {file['state']:10} {file['path']}"
                + (f"\n    {file['detail']}" * bool(file["detail"]))
            )
        if report["loaded"]:
            print(f"in this process: {', '.join(report['loaded'])} imported")
        for line in report["not_bound"]:
            print(f"  not bound: {line}")
    return 0 if report["state"] == "patched" and not report["not_bound"] else 1


def _apply(arguments: argparse.Namespace) -> int:
    if not arguments.force:
        from .binding.disk import apply

        return _print_changed("patched", apply(arguments.tree))
    from .binding.forced import apply_forced

    changed, checks = apply_forced(arguments.tree)
    print(checks)
    return _print_changed("patched", changed)


def _revert(arguments: argparse.Namespace) -> int:
    from .binding.disk import revert

    return _print_changed("restored", revert(arguments.tree))


def _diff(arguments: argparse.Namespace) -> int:
    from .binding.diff import diff

    sys.stdout.buffer.write(diff(arguments.tree))
    return 0


def _wheel(arguments: argparse.Namespace) -> int:
    from .binding.wheel import repack

    print(f"wrote {repack(arguments.wheel, arguments.out)}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from .show import run

    return run(arguments)


def _print_changed(verb: str, changed: list[Any]) -> int:
    for path in changed:
        print(f"{verb} {path}")
    if not changed:
        print("nothing to change")
    return 0


if __name__ == "__main__":
    sys.exit(main())
