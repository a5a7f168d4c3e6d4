"""Other launchers' command lines, and the profile of each: how its programs expect to be started.

A user's torchrun, fleetrun or horovodrun command line enters; a `RunRequest` with a `LauncherSpec` leaves. The
commands in `cli` call these packages. `launch` sees only the interface of a profile (`launch/profile.py`), and a plain
`rankless run` imports nothing of this folder.

To add a launcher `name`, make a package of that name with:

- `options.py`, `parser.py` and `run_config.py`: its options, their parser, and the `RunRequest` that they mean;
- `profile_settings.py`: a frozen msgspec struct with what the profile needs of the options, and a function that returns
  its `LauncherSpec` (`make_launcher_spec("name", settings)`), which `run_config.py` puts into the `RunRequest`;
- `profile.py`: a class that derives from `LauncherProfile` and overrides what differs from a plain `rankless run`, and
  `make_profile(settings)`, which decodes the settings (`decode_settings`) and returns the profile;

and a command in `cli`. `tests/launchers/test_profiles.py` checks every package here against the interface: give it an
example of the new launcher's settings.
"""
