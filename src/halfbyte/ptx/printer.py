"""A `syntax.Module` as PTX text; `parse` of that text gives an equal module."""

from collections.abc import Iterable

from halfbyte.ptx.syntax import (
    Address,
    Alias,
    ArgumentList,
    Attribute,
    BranchTargets,
    CallPrototype,
    CallTargets,
    Declaration,
    Directive,
    Element,
    Function,
    Immediate,
    Initializer,
    InitializerList,
    Instruction,
    Kernel,
    Label,
    Module,
    ModuleItem,
    Negated,
    Operand,
    Pair,
    Register,
    Scope,
    Section,
    Sink,
    SourceFile,
    SourceLocation,
    Statement,
    Symbol,
    SymbolOffset,
    TensorAddress,
    Text,
    Variable,
    Vector,
)

_DATA_DIRECTIVES = (".b8", ".b16", ".b32", ".b64")


def format_module(module: Module) -> str:
    """Return the text of a module, one statement a line."""
    lines = [
        f".version {module.version}",
        f".target {', '.join(module.target)}",
        f".address_size {module.address_size}",
        "",
    ]
    for item in module.items:
        lines.extend(_format_item(item))
    return "\n".join(lines) + "\n"


def format_instruction(instruction: Instruction) -> str:
    """Return one instruction with its guard and semicolon."""
    guard = ""
    if instruction.guard is not None:
        guard = f"@{'!' if instruction.guard.negated else ''}{instruction.guard.register.name} "
    operands = ", ".join(map(format_operand, instruction.operands))
    return f"{guard}{instruction.opcode}{' ' if operands else ''}{operands};"


def format_operand(operand: Operand) -> str:
    """Return the text of one operand."""
    match operand:
        case Register(name) | Symbol(name):
            return name
        case Immediate(text=text):
            return text
        case Address():
            return f"[{_format_target(operand)}]{'.unified' if operand.is_unified else ''}"
        case Vector(items):
            return "{" + ", ".join(map(format_operand, items)) + "}"
        case Sink():
            return "_"
        case Negated(register):
            return f"!{register.name}"
        case Pair(first, second):
            return f"{format_operand(first)}|{format_operand(second)}"
        case Element(register, component):
            return f"{register.name}.{component}"
        case TensorAddress(tensor_map, coordinates, extra):
            rest = ", ".join(map(format_operand, (coordinates, *extra)))
            return f"[{_format_target(tensor_map)}, {rest}]"
        case ArgumentList(items):
            return "(" + ", ".join(map(format_operand, items)) + ")"
        case SymbolOffset():
            return _format_symbol_offset(operand)


def _format_target(address: Address) -> str:
    # `+-8`, as NVIDIA's compilers write it
    offset = f"+{address.offset}" if address.offset else ""
    return format_operand(address.target) + offset


def _format_symbol_offset(value: SymbolOffset) -> str:
    text = f"generic({value.name})" if value.is_generic else value.name
    if value.offset:
        text += f"{value.offset:+d}"
    return text if value.mask is None else f"{value.mask:#x}({text})"


def _format_item(item: ModuleItem) -> list[str]:
    match item:
        case Kernel() | Function():
            return _format_function(item)
        case Declaration():
            return [_format_declaration(item)]
        case SourceFile(index, name, numbers):
            return [", ".join([f'.file {index} "{name}"', *map(str, numbers)])]
        case Section():
            return _format_section(item)
        case Alias(name, target):
            return [f".alias {name}, {target};"]
        case Directive():
            return [format_directive(item)]
        case SourceLocation():
            return [_format_location(item)]


def _format_function(item: Kernel | Function) -> list[str]:
    head = [f".{item.linkage}"] if item.linkage else []
    head.append(".entry" if isinstance(item, Kernel) else ".func")
    head.extend(map(_format_attribute, item.attributes))
    if isinstance(item, Function) and item.returns:
        head.append(_format_parameters(item.returns, ""))
    head.append(item.name)
    if item.has_parameter_list:
        head.append(_format_parameters(item.parameters, "\n\t"))
    lines = [" ".join(head), *map(format_directive, item.directives)]
    if item.body is None:
        lines[-1] += ";" if lines[-1][-1] != ";" else "\n;"
        return lines
    return [*lines, *_format_scope(item.body, ""), ""]


def _format_parameters(parameters: Iterable[Variable], separator: str) -> str:
    return "(" + ",".join(separator + _format_parameter(p) for p in parameters) + ")"


def _format_parameter(parameter: Variable) -> str:
    parts = [f".{parameter.space}", *map(_format_attribute, parameter.attributes)]
    parts.extend(_format_traits(parameter))
    if parameter.pointer is not None:
        parts.append(".ptr")
        if parameter.pointer.space:
            parts.append(f".{parameter.pointer.space}")
        if parameter.pointer.alignment:
            parts.append(f".align {parameter.pointer.alignment}")
    return " ".join([*parts, parameter.name + _format_dimensions(parameter.dimensions)])


def _format_traits(item: Variable | Declaration) -> Iterable[str]:
    if item.alignment:
        yield f".align {item.alignment}"
    if item.vector > 1:
        yield f".v{item.vector}"
    yield f".{item.type}"


def _format_dimensions(dimensions: Iterable[int | None]) -> str:
    return "".join("[]" if length is None else f"[{length}]" for length in dimensions)


def _format_attribute(attribute: Attribute) -> str:
    arguments = ", ".join(argument.text for argument in attribute.arguments)
    return f".attribute(.{attribute.name}{f'({arguments})' if arguments else ''})"


def _format_declaration(item: Declaration) -> str:
    parts = [f".{item.linkage}"] if item.linkage else []
    parts.append(f".{item.space}")
    parts.extend(map(_format_attribute, item.attributes))
    parts.extend(_format_traits(item))
    names = []
    for declarator in item.declarators:
        name = declarator.name + ("" if declarator.count is None else f"<{declarator.count}>")
        name += _format_dimensions(declarator.dimensions)
        if declarator.initializer is not None:
            name += f" = {_format_initializer(declarator.initializer)}"
        names.append(name)
    return f"{' '.join(parts)} {', '.join(names)};"


def _format_initializer(initializer: Initializer) -> str:
    match initializer:
        case InitializerList(items):
            return "{" + ", ".join(map(_format_initializer, items)) + "}"
        case Text(value):
            return f'"{value}"'
        case Immediate(text=text):
            return text
        case SymbolOffset():
            return _format_symbol_offset(initializer)


def format_directive(directive: Directive) -> str:
    """Return a directive with its arguments, and the semicolon where it has one."""
    arguments = ", ".join(
        f'"{argument.value}"' if isinstance(argument, Text) else format_operand(argument)
        for argument in directive.arguments
    )
    end = ";" if directive.name == "pragma" else ""
    return f".{directive.name}{' ' if arguments else ''}{arguments}{end}"


def _format_location(location: SourceLocation) -> str:
    text = f".loc {location.file} {location.line} {location.column}"
    if location.function_name:
        offset = f"{location.function_offset:+d}" if location.function_offset else ""
        text += f", function_name {location.function_name}{offset}"
    if location.inlined_at is not None:
        at = location.inlined_at
        text += f", inlined_at {at.file} {at.line} {at.column}"
    return text


def _format_section(section: Section) -> list[str]:
    lines = [f".section {section.name}", "{"]
    current: list[str] = []
    following = (*section.tokens[1:], "")
    for token, after in zip(section.tokens, following, strict=False):
        if (token in _DATA_DIRECTIVES or after == ":") and current:
            lines.append(" ".join(current))
            current = []
        current.append(token)
    return [*lines, " ".join(current), "}", ""]


def _format_scope(scope: Scope, indent: str) -> list[str]:
    lines = [indent + "{"]
    for statement in scope.statements:
        if isinstance(statement, Scope):
            lines.extend(_format_scope(statement, indent + "\t"))
        elif isinstance(statement, Label):
            lines.append(f"{indent}{statement.name}:")
        else:
            lines.append(f"{indent}\t{_format_statement(statement)}")
    return [*lines, indent + "}"]


def _format_statement(statement: Statement) -> str:
    match statement:
        case Instruction():
            return format_instruction(statement)
        case Declaration():
            return _format_declaration(statement)
        case SourceLocation():
            return _format_location(statement)
        case Directive():
            return format_directive(statement)
        case BranchTargets(name, labels):
            return f"{name}: .branchtargets {', '.join(labels)};"
        case CallTargets(name, functions):
            return f"{name}: .calltargets {', '.join(functions)};"
        case CallPrototype():
            returns = _format_parameters(statement.returns, "")
            parameters = _format_parameters(statement.parameters, "")
            parts = [returns, statement.function, parameters]
            parts.extend(map(format_directive, statement.directives))
            return f"{statement.name}: .callprototype {' '.join(parts)};"
        case _:
            raise TypeError(f"{type(statement).__name__} is printed by its scope")
