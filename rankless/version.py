"""The version of this package. This file imports nothing."""

VERSION = "0.1.0"
