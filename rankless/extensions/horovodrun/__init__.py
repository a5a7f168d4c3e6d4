"""horovodrun: its options and config files, and the profile of its programs."""
