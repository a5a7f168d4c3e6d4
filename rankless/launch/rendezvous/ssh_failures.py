"""Finds out why ssh has failed, from the messages of OpenSSH and of the shells that it starts."""

import os
import sys
from dataclasses import dataclass

from rankless.installation import format_install_command


@dataclass(frozen=True)
class SshCause:
    """A cause of failure and its remedy, as text."""

    seen: str
    fix: str


# The order matters: the first match is the cause of later ones. `{host}` is ssh's target.
_CAUSES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": SshCause(
        "the host's key differs from the one in known_hosts",
        "if it was reinstalled: ssh-keygen -R {host}, then log in once by hand; if not, find out who answers there",
    ),
    "Host key verification failed": SshCause(
        "the host's key is not known here",
        "log in once by hand (ssh {host} true), or: ssh-keyscan {host} >> ~/.ssh/known_hosts",
    ),
    "UNPROTECTED PRIVATE KEY": SshCause(
        "other users may read this user's private key, so ssh ignores it", "chmod 600 on the key that ssh names"
    ),
    "Too many authentication failures": SshCause(
        "the host rejects ssh after too many keys",
        "name the right key for {host} in ~/.ssh/config: IdentityFile, and IdentitiesOnly yes",
    ),
    "Permission denied": SshCause(
        "ssh asks for a password", "copy a key there: ssh-copy-id {host}; a key with a passphrase needs ssh-agent"
    ),
    "Could not resolve hostname": SshCause(
        "its name does not resolve here", "correct the name, add it to /etc/hosts, or list the host by its address"
    ),
    "Connection refused": SshCause(
        "it is up, but no sshd listens",
        "start sshd there (systemctl start ssh), or name its port in ~/.ssh/config",
    ),
    "Connection timed out": SshCause(
        "no answer: it is down, or a firewall drops packets to it", "check that it is up, and let TCP port 22 through"
    ),
    "Operation timed out": SshCause(
        "no answer: it is down, or a firewall drops packets to it", "check that it is up, and let TCP port 22 through"
    ),
    "No route to host": SshCause(
        "no route to it: the host or its network is down", "check that it is up, and its cable and network"
    ),
    "Network is unreachable": SshCause(
        "no route to it: the network of this host is down or lacks the route", "see `ip route` here"
    ),
    "Connection closed by": SshCause(
        "sshd closes the connection at once",
        "see its log there (journalctl -u ssh): MaxStartups, AllowUsers, DenyUsers",
    ),
    "Connection reset by": SshCause(
        "sshd closes the connection at once",
        "see its log there (journalctl -u ssh): MaxStartups, AllowUsers, DenyUsers",
    ),
    "No module named 'rankless'": SshCause(
        "Rankless is not installed there", "install it there, at the same path: {install}"
    ),
    "No module named": SshCause("the interpreter there lacks a package", "install the same packages there as here"),
    "No such file or directory": SshCause(
        "the folder or the interpreter of this host does not exist there",
        "copy {folder} and {python} there, or share them",
    ),
    "not found": SshCause("the interpreter of this host does not exist there", "copy {python} there, or share it"),
    "not available": SshCause("the user may not log in there", "log in as another user: user@{host}"),
}


def find_ssh_cause(output: str, host: str) -> SshCause | None:
    """Return the cause that ssh's output shows, or None."""
    for pattern, cause in _CAUSES.items():
        if pattern in output:
            install = format_install_command(pip=f"{sys.executable} -m pip")
            fix = cause.fix.format(host=host, python=sys.executable, install=install, folder=os.getcwd())
            return SshCause(cause.seen, fix)
    return None
