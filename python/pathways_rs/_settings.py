"""What the environment says: the options that travel to the controller, and the switches of this package."""

import os

# Only these travel; every other PATHWAYS_* variable belongs to somebody else.
_OPTIONS = ("NAME", "WEIGHT", "PRIORITY", "MEMORY", "SLICE", "TOKEN")
# They travel in one HTTP/2 header, and a server may refuse a header beyond 8 KiB (a third is lost to base64).
_OPTIONS_BYTES_MAX = 4096

CONNECT_SECONDS_DEFAULT = 10.0


class SettingError(RuntimeError):
    """A variable of the environment that cannot be used as it is."""


def initialization_data():
    """The options of the environment under the names that the controller knows, e.g. {"pathways.name": b"train"}."""
    data = {}
    for name in _OPTIONS:
        value = os.environ.get(f"PATHWAYS_{name}", "")
        if value:
            data[f"pathways.{name.lower()}"] = os.fsencode(value)
    size = sum(len(k) + len(v) for k, v in data.items())
    if size > _OPTIONS_BYTES_MAX:
        longest = max(data, key=lambda k: len(data[k]))
        raise SettingError(
            f"the PATHWAYS_* options are {size} bytes, more than the {_OPTIONS_BYTES_MAX} that fit into a connection; "
            f"the longest is {longest.replace('.', '_').upper()}"
        )
    return data


def switch(name):
    """Whether PATHWAYS_RS<name> is on; everything is on by default."""
    return os.environ.get(f"PATHWAYS_RS{name}", "1").strip().lower() not in ("0", "false", "off", "no")


def connect_seconds():
    """How long to try to reach a controller when the caller of `get_client` set no limit."""
    text = os.environ.get("PATHWAYS_RS_CONNECT_TIMEOUT", "")
    if not text:
        return CONNECT_SECONDS_DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e6:
        raise SettingError(f"PATHWAYS_RS_CONNECT_TIMEOUT is {text!r}; it takes a number of seconds, e.g. 30")
    return seconds
