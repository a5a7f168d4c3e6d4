"""Why ssh has failed, by what it says: OpenSSH's own words, and those of the shells it starts."""

import os
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class SshCause:
    """One cause in words, and what mends it."""

    seen: str
    fix: str


# In this order: what stands first is the cause of what may stand beside it. `{host}` is what ssh was given.
_CAUSES = {
    "REMOTE HOST IDENTIFICATION HAS CHANGED": SshCause(
        "the host has another key than known_hosts says",
        "if it was installed anew: ssh-keygen -R {host}, then log in once by hand; if not, find out who answers there",
    ),
    "Host key verification failed": SshCause(
        "the host's key is not known here",
        "log in once by hand (ssh {host} true), or: ssh-keyscan {host} >> ~/.ssh/known_hosts",
    ),
    "UNPROTECTED PRIVATE KEY": SshCause(
        "others may read this user's private key, so ssh does not use it", "chmod 600 on the key that ssh names"
    ),
    "Too many authentication failures": SshCause(
        "the host turns ssh away after too many keys",
        "name the right key for {host} in ~/.ssh/config: IdentityFile, and IdentitiesOnly yes",
    ),
    "Permission denied": SshCause(
        "ssh asks for a password", "bring a key there: ssh-copy-id {host}; a key with a passphrase needs ssh-agent"
    ),
    "Could not resolve hostname": SshCause(
        "its name does not resolve here", "correct the name, write it into /etc/hosts, or list the host by its address"
    ),
    "Connection refused": SshCause(
        "it is up, but no sshd listens",
        "start sshd there (systemctl start ssh), or name its port in ~/.ssh/config",
    ),
    "Connection timed out": SshCause(
        "no answer: it is down, or a firewall drops packets to it", "see that it is up, and let TCP port 22 through"
    ),
    "Operation timed out": SshCause(
        "no answer: it is down, or a firewall drops packets to it", "see that it is up, and let TCP port 22 through"
    ),
    "No route to host": SshCause(
        "no way leads to it: its network or it is down", "see that it is up, and its cable and network"
    ),
    "Network is unreachable": SshCause(
        "no way leads to it: this host's network is down, or knows no route", "see `ip route` here"
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
        "Rankless is not installed there", "install it there, at the same place: {python} -m pip install rankless"
    ),
    "No module named": SshCause("the interpreter there lacks a package", "install the same packages there as here"),
    "No such file or directory": SshCause(
        "the folder or the interpreter of this host is not there", "bring {folder} and {python} there, or share them"
    ),
    "not found": SshCause("the interpreter of this host is not there", "bring {python} there, or share it"),
    "not available": SshCause("the user may not log in there", "log in as another user: user@{host}"),
}


def find_ssh_cause(said: str, host: str) -> SshCause | None:
    """The cause, if ssh's words tell one."""
    for sign, cause in _CAUSES.items():
        if sign in said:
            return SshCause(cause.seen, cause.fix.format(host=host, python=sys.executable, folder=os.getcwd()))
    return None
