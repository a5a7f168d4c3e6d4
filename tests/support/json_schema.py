"""A validator for the part of JSON Schema that the schemas of our results use; it refuses other words."""

import json
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[2] / "docs" / "reference" / "schemas"
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
KNOWN = {
    *("$schema", "$defs", "$ref", "title", "description", "default", "type", "properties", "required", "items"),
    *("anyOf", "enum", "const", "additionalProperties", "prefixItems", "minItems", "maxItems"),
}


def check_result(text: str, command: str) -> dict[str, Any]:
    """Return what a command wrote with `--json`, after comparing it with the schema in the documentation."""
    schema = json.loads((SCHEMAS / f"{command}.schema.json").read_text())
    result: dict[str, Any] = json.loads(text)
    errors = find_errors(result, schema, schema["$defs"], "result", closed=True)
    assert not errors, "\n".join(errors)
    return result


def find_errors(value: Any, schema: dict[str, Any], definitions: dict[str, Any], at: str, *, closed: bool) -> list[str]:
    """Return the differences between a value and its schema; if `closed`, fields without a description are one too."""
    assert schema.keys() <= KNOWN, f"{at}: unknown words {schema.keys() - KNOWN}"
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
        return find_errors(value, schema, definitions, at, closed=closed)
    if "anyOf" in schema:
        tries = [find_errors(value, option, definitions, at, closed=closed) for option in schema["anyOf"]]
        return [] if [] in tries else [f"{at}: no alternative fits {value!r}: {tries}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{at}: {value!r} is none of {schema['enum']}"]
    if "const" in schema and value != schema["const"]:
        return [f"{at}: {value!r} is not {schema['const']!r}"]
    wanted = schema.get("type")
    if wanted and (not isinstance(value, TYPES[wanted]) or (isinstance(value, bool) and wanted != "boolean")):
        return [f"{at}: {value!r} is no {wanted}"]
    errors = []
    if isinstance(value, dict):
        known = schema.get("properties", {})
        errors += [f"{at}: no {name!r}" for name in schema.get("required", ()) if name not in value]
        others = schema.get("additionalProperties")
        for name, item in value.items():
            if name in known:
                errors += find_errors(item, known[name], definitions, f"{at}.{name}", closed=closed)
            elif isinstance(others, dict):
                errors += find_errors(item, others, definitions, f"{at}.{name}", closed=closed)
            elif closed:
                errors.append(f"{at}: {name!r} is not in the schema")
    if isinstance(value, list):
        first = schema.get("prefixItems", [])
        for number, item in enumerate(value):
            expected = first[number] if number < len(first) else schema.get("items", {})
            errors += find_errors(item, expected or {}, definitions, f"{at}[{number}]", closed=closed)
    return errors
