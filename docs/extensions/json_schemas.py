"""The JSON Schemas of what commands write with `--json`, made from the types and the docstrings of the source.

    python docs/extensions/json_schemas.py

writes them to docs/reference/schemas. A command that has `--json` names the type of its result as `JSON_CONTENT`.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import msgspec
from sphinx.pycode import ModuleAnalyzer

from rankless import cli
from rankless.cli.json_output import JsonHeader
from rankless.records import encoding

FOLDER = Path(__file__).parents[1] / "reference" / "schemas"


def make_schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each command that has a result."""
    commands = {name: importlib.import_module(f"rankless.cli.{name}") for name in cli.COMMANDS}
    return {
        name: add_descriptions(make_json_schema(name, command.JSON_CONTENT), command.JSON_CONTENT)
        for name, command in commands.items()
        if hasattr(command, "JSON_CONTENT")
    }


def make_json_schema(command: str, content: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the JSON Schema of a command's result, whose own fields are those of `content`."""
    _, definitions = msgspec.json.schema_components([JsonHeader, content], ref_template="#/$defs/{name}")
    header, fields = definitions.pop("JsonHeader"), definitions.pop(content.__name__)
    if f'"#/$defs/{content.__name__}"' in encoding.encode_json([fields, definitions]).decode():
        definitions[content.__name__] = fields  # a result may contain results of its own kind
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"rankless {command} --json",
        "description": fields.get("description", ""),
        "type": "object",
        "properties": header["properties"] | {"command": {"const": command}} | fields["properties"],
        "required": [*header["properties"], *fields.get("required", ())],
        "$defs": definitions,
    }


def add_descriptions(schema: dict[str, Any], content: type[msgspec.Struct]) -> dict[str, Any]:
    """Add the docstrings of attributes to the fields of a schema."""
    described = {"": schema, **schema["$defs"]}
    for struct in [JsonHeader, *list_structs(content)]:
        name = struct.__name__ if struct.__name__ in schema["$defs"] else ""
        for base in (base for base in struct.__mro__ if base.__module__.startswith("rankless.")):
            documented = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
            for field, properties in described[name]["properties"].items():
                if text := " ".join(documented.get((base.__name__, field), [])).strip():
                    properties.setdefault("description", text)
    return schema


def list_structs(content: type[msgspec.Struct]) -> list[type[msgspec.Struct]]:
    """Return the type of a result and the types of its parts."""
    found: list[type[msgspec.Struct]] = []

    def visit(node: Any) -> None:
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls in found:
                return
            found.append(node.cls)
            parts: list[Any] = [field.type for field in node.fields]
        else:
            parts = [getattr(node, name, None) for name in ("item_type", "value_type", "key_type")]
            parts += [*getattr(node, "item_types", ()), *getattr(node, "types", ())]
        for part in parts:
            if isinstance(part, msgspec.inspect.Type):
                visit(part)

    visit(msgspec.inspect.type_info(content))
    return found


def format_schema(schema: dict[str, Any]) -> str:
    """Return a schema as the text of its file."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def main() -> None:
    """Write all schemas."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in make_schemas().items():
        (FOLDER / f"{name}.schema.json").write_text(format_schema(schema))


if __name__ == "__main__":
    main()
