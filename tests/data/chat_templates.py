# SPDX-License-Identifier: Apache-2.0
"""Small chat templates of the forms that published models have, in two versions each.

`PLAIN` is the template that comes with a model. `MARKED` has generation blocks where
the model writes. `tests/against_transformers/test_turns.py` compares the two.
"""

_MARKS = ("{%- generation -%}", "{%- endgeneration -%}")


def _both(text: str) -> tuple[str, str]:
    marked = text.replace("OPEN", _MARKS[0]).replace("CLOSE", _MARKS[1])
    return text.replace("OPEN", "").replace("CLOSE", ""), marked


_CALLS = (
    "{%- for call in m.tool_calls or [] -%}{{- '<call>' + (call.function | tojson) +"
    " '</call>' -}}{%- endfor -%}"
)
_TOOLS = (
    "{%- if tools -%}{{- '<|im_start|>tools' + (tools | tojson) + '<|im_end|>' -}}"
    "{%- endif -%}"
)
_ASKS = "{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' -}}"


def _chatml(answer: str, prompt: str) -> str:
    return (
        _TOOLS
        + "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        + answer
        + "{%- else -%}"
        + _ASKS
        + "{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}{{- '"
        + prompt
        + "' -}}{%- endif -%}"
    )


_HEADER = "{{- '<|im_start|>assistant\\n' -}}"
_REASONING = (
    "{%- set thought = m.reasoning_content or '' -%}{%- set said = m.content or '' -%}"
    "{%- if '</think>' in said -%}{%- set thought = "
    "said.split('</think>')[0].split('<think>')[-1] -%}"
    "{%- set said = said.split('</think>')[-1] -%}{%- endif -%}"
)
FORMS = {
    # the prompt opens a thought, and so does each answer
    "thought": _chatml(
        _REASONING + _HEADER + "{{- '<think>' -}}OPEN"
        "{{- '\\n' + thought + '</think>' + said -}}" + _CALLS + "{{- '<|im_end|>' -}}"
        "CLOSE{{- '\\n' -}}",
        "<|im_start|>assistant\\n<think>",
    ),
    # the prompt opens a thought, but the template writes none
    "thought_cut": _chatml(
        _REASONING + _HEADER + "OPEN{{- said -}}" + _CALLS + "{{- '<|im_end|>' -}}CLOSE"
        "{{- '\\n' -}}",
        "<|im_start|>assistant\\n<think>\\n",
    ),
    # no thought is wanted, and the prompt says so
    "no_thought": _chatml(
        _HEADER
        + "{{- '<think>\\n\\n</think>\\n\\n' -}}OPEN{{- m.content or '' -}}"
        + _CALLS
        + "{{- '<|im_end|>' -}}CLOSE{{- '\\n' -}}",
        "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n",
    ),
    # only the last answer has an end of text
    "last_end": _chatml(
        _HEADER + "OPEN{{- m.content or '' -}}" + _CALLS + "{{- '<|im_end|>' -}}"
        "{%- if loop.last -%}{{- eos_token -}}{%- endif -%}CLOSE",
        "<|im_start|>assistant\\n",
    ),
    # content must be a string, and so must arguments
    "strings": _chatml(
        _HEADER + "OPEN{{- m['content'] + '' -}}"
        "{%- for call in m.tool_calls or [] -%}{{- '<call>' + call.function.name + "
        "' ' + call.function.arguments -}}{%- endfor -%}{{- '<|im_end|>' -}}CLOSE",
        "<|im_start|>assistant\\n",
    ),
    # no prompt for an answer after a tool
    "after_tool": _chatml(
        _HEADER + "OPEN{{- m.content or '' -}}" + _CALLS + "{{- '<|im_end|>' -}}CLOSE",
        "' + ('' if messages[-1].role == 'tool' else '<|im_start|>assistant\\n') + '",
    ),
}
PLAIN = {name: _both(text)[0] for name, text in FORMS.items()}
MARKED = {name: _both(text)[1] for name, text in FORMS.items()}

# The next header ends an answer
ENDLESS = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\\n' -}}"
    "{{- m.content or '' -}}"
    + _CALLS
    + "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant' -}}"
    "{%- endif -%}"
)
# Earlier reasoning is dropped, the last answer's is kept
FORGETFUL = _chatml(
    "{%- set thought = '<think>' + (m.reasoning_content or '') + '</think>' -%}"
    + _HEADER
    + "{{- (thought if loop.last else '') + (m.content or '') + '<|im_end|>' -}}",
    "<|im_start|>assistant\\n<think>",
)
