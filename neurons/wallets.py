"""The hotkey of this process, from a Bittensor wallet. The coldkey is never opened."""

import sys
from collections.abc import Callable
from pathlib import Path

import bittensor as bt
from bittensor.keyfiles import KeyfileError, Keypair, WrongPasswordError

from neurons.exit_codes import ExitCode
from neurons.settings import PASSWORD_VARIABLE, NodeSettings, hotkey_password, user_path
from subnet.errors import StartupRefused


def load_hotkey(node: NodeSettings, *, password: str | None = None, is_interactive: bool | None = None) -> Keypair:
    """The key pair that signs for this node. Raises StartupRefused saying what is missing and what to type.

    An encrypted key takes `password`, else STRATA_HOTKEY_PASSWORD, else the SDK's own variable, else a question when
    `is_interactive` (by default: when there is a terminal); a service without one ends at once instead of waiting for an
    answer (users.md 34).
    """
    password = password or hotkey_password()
    is_interactive = sys.stdin.isatty() if is_interactive is None else is_interactive
    wallet = bt.Wallet(node.wallet, node.hotkey, node.wallet_path)
    _require_files(node)
    try:
        if wallet.hotkey_file.is_encrypted() and not (password or _sdk_has_password(wallet) or is_interactive):
            raise StartupRefused(
                f"hotkey {node.hotkey!r} of wallet {node.wallet!r} is encrypted and there is no terminal to ask on.\n"
                f"Set {PASSWORD_VARIABLE} to its password (systemd: in an EnvironmentFile that only this user can read).",
                ExitCode.HOTKEY_ENCRYPTED,
            )
        keypair = wallet.get_hotkey(password)
    except WrongPasswordError:
        raise StartupRefused(
            f"the password of hotkey {node.hotkey!r} of wallet {node.wallet!r} is wrong; look at {PASSWORD_VARIABLE}.",
            ExitCode.HOTKEY_ENCRYPTED,
        ) from None
    except (KeyfileError, OSError, ValueError) as error:
        raise StartupRefused(
            f"hotkey file {wallet.hotkey_file.path} cannot be used: {error}.\n"
            f"Restore it with: btcli wallet regen-hotkey -w {node.wallet} -H {node.hotkey}",
            ExitCode.NO_WALLET,
        ) from error
    _require_private(keypair, node)
    return keypair


def _sdk_has_password(wallet: bt.Wallet) -> bool:
    return bool(bt.sp_core.get_password_from_environment(wallet.hotkey_file.env_var_name()))


def _require_files(node: NodeSettings) -> None:
    root = user_path(node.wallet_path)
    directory = root / node.wallet
    if not _is_there(directory.is_dir):
        raise StartupRefused(
            f"there is no wallet {node.wallet!r} in {root} ({_present(root)}).\n"
            f"Create one with: btcli wallet create -w {node.wallet} -H {node.hotkey}   "
            "or name yours with --wallet.name and --wallet.path.",
            ExitCode.NO_WALLET,
        )
    if not _is_there((directory / "hotkeys" / node.hotkey).is_file):
        raise StartupRefused(
            f"wallet {node.wallet!r} in {root} has no hotkey {node.hotkey!r} ({_present(directory / 'hotkeys')}).\n"
            f"Create it with: btcli wallet new-hotkey -w {node.wallet} -H {node.hotkey}   "
            "or name yours with --wallet.hotkey.",
            ExitCode.NO_WALLET,
        )


def _present(directory: Path) -> str:
    try:
        names = sorted(path.name for path in directory.iterdir() if not path.name.endswith("pub.txt"))
    except FileNotFoundError:
        return "it does not exist"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return "it has " + ", ".join(names[:8]) if names else "it is empty"


def _is_there(check: Callable[[], bool]) -> bool:
    """False also where a directory on the way cannot be entered; `_present` says why."""
    try:
        return check()
    except OSError:
        return False


def _require_private(keypair: Keypair, node: NodeSettings) -> None:
    try:
        keypair.sign(b"strata")
    except ValueError as error:
        raise StartupRefused(
            f"hotkey {node.hotkey!r} of wallet {node.wallet!r} is only a public key; a node signs every request with it.\n"
            "Copy the private hotkey file to this machine, never the coldkey.",
            ExitCode.NO_WALLET,
        ) from error
