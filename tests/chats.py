"""Chat tokenizers for tests: a byte a token, with short templates after those of published models."""

import dataclasses

import tokenizers

from jaxrl.data.chat import ChatTemplate
from jaxrl.data.tokenizer import Tokenizer, train_tokenizer

# As Qwen2.5's: two tool messages in a row are one turn of the user.
CHATML = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n' if m.content or not loop.first }}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# As Qwen3's: reasoning is shown until the user speaks again.
THINKING = CHATML.replace(
    "{{- '<|im_start|>' + m.role + '\\n' + m.content }}",
    """{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'user') | list %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.reasoning_content and not later %}
{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' }}
{%- endif %}
{{- m.content.split('</think>')[-1].lstrip('\\n') }}""",
)

# As Llama 3's: texts are trimmed, a call is the whole message.
LLAMA = """\
{{- '<|bos|>' }}
{%- for t in tools or [] %}{{ t | tojson }}, "parameters" for ipython{% endfor %}
{%- for m in messages %}
{{- '<|head|>' + ('ipython' if m.role == 'tool' else m.role) + '<|/head|>\\n\\n' }}
{%- if 'tool_calls' in m %}
{%- set f = m.tool_calls[0].function %}
{{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}' }}
{%- else %}
{{- m.content | trim }}
{%- endif %}
{{- '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# As Mistral's: tools stand before the last message of the user, tool messages only after calls.
MISTRAL = """\
{{- '<s>' }}
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role == 'assistant' and not messages[loop.index0 - 1].tool_calls %}
{{- raise_exception('a result without its call') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
{{- '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% endif %}
{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + (']</s>' if loop.last else ', ') }}
{%- endfor %}
{%- else %}
{{- ' ' + m.content + '</s>' }}
{%- endif %}
{%- endfor %}"""

# As Qwen3-Coder's and Qwen3.5's: values that are text stand as they are.
CODER = (
    CHATML.split("{{- '<tool_call>")[0]
    + """\
{{- '<tool_call>\\n<function=' + c.function.name + '>\\n' }}
{%- for key, value in c.function.arguments.items() %}
{{- '<parameter=' + key + '>\\n' }}
{%- if value is mapping or (value is sequence and value is not string) %}{{- value | tojson }}
{%- else %}{{- value | string }}{% endif %}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)

# As GLM-4.5's: a turn ends with the name of who speaks next.
GLM = """\
{{- '[gMASK]<sop>' }}
{%- for t in tools or [] %}{{ t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else %}
{{- '<|' + m.role + '|>\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '\\n<tool_call>' + c.function.name + '\\n' }}
{%- for key, value in c.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' }}
{{- value if value is string else value | tojson(ensure_ascii=False) }}
{{- '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# As Gemma 4's: values in a notation of its own.
GEMMA = """\
{%- macro written(value) %}
{%- if value is string %}{{ '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping %}{{ '{' }}
{%- for k, v in value | dictsort %}{{ k }}:{{ written(v) }}{{ ',' if not loop.last }}{% endfor %}
{{- '}' }}
{%- elif value is sequence %}{{ '[' }}
{%- for v in value %}{{ written(v) }}{{ ',' if not loop.last }}{% endfor %}{{ ']' }}
{%- else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{{- '<bos>' }}
{%- for t in tools or [] %}{{ '<|tool>' + t.function.name + '<tool|>' }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{{- '<|tool_response>response:f{value:' + written(m.content) + '}<tool_response|>' }}
{%- else %}
{{- '<|turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content }}
{%- for c in m.tool_calls or [] %}
{{- '<|tool_call>call:' + c.function.name + written(c.function.arguments) + '<tool_call|>' }}
{%- endfor %}
{{- '<turn|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""

# As gpt-oss's: an answer is messages on channels; earlier ones lose their analysis.
HARMONY = """\
{%- for t in tools or [] %}{{ 'type ' + t.function.name + ' = ' + t | tojson }}{% endfor %}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.reasoning_content %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' }}
{%- endif %}
{%- if m.tool_calls %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}
{{- f.arguments | tojson + '<|call|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- elif m.role == 'tool' %}
{%- if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}
{{- '<|start|>functions.' + messages[loop.index0 - 1].tool_calls[0].function.name }}
{{- ' to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
{%- else %}
{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""

# As Ministral 3's: a name and its arguments.
MINISTRAL = MISTRAL.replace(
    """{{- (c.function | tojson)[:-1] + ', "id": "' + c.id + '"}' + (']</s>' if loop.last else ', ') }}""",
    """{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + c.function.arguments | tojson }}
{{- '</s>' if loop.last }}""",
).replace("{{- '[TOOL_CALLS] [' }}", "{{- m.content }}")

SPECIAL = {
    MINISTRAL: ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"),
    CODER: ("<|im_end|>", "<|im_start|>"),
    GLM: ("<|user|>", "<|observation|>", "<|assistant|>", "[gMASK]", "<sop>"),
    GEMMA: ("<turn|>", "<|turn>", "<bos>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool>"),
    HARMONY: (
        *("<|return|>", "<|call|>", "<|start|>", "<|end|>"),
        *("<|channel|>", "<|message|>", "<|constrain|>"),
    ),
    CHATML: ("<|im_end|>", "<|im_start|>"),
    THINKING: ("<|im_end|>", "<|im_start|>"),
    LLAMA: ("<|eot|>", "<|bos|>", "<|head|>", "<|/head|>", "<|python_tag|>"),
    MISTRAL: ("</s>", "<s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
}
# Tokens that `decode` shows.
SHOWN = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
# Special tokens that end an answer besides the first.
ENDS = {GLM: ("<|observation|>",), HARMONY: ("<|call|>",)}


def chat_tokenizer(template: str = CHATML) -> Tokenizer:
    """About 300 tokens. The first special token of a template ends a turn, as does `<eos>`."""
    plain = train_tokenizer(["the tool and the answer"] * 2, vocab_size=270)
    backend = tokenizers.Tokenizer.from_str(plain.backend.to_str())
    backend.add_special_tokens(list(SPECIAL[template]))
    backend.add_tokens(list(SHOWN))
    end, *others = map(backend.token_to_id, (SPECIAL[template][0], *ENDS.get(template, ())))
    return dataclasses.replace(
        plain,
        backend=backend,
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        eos_id=end,
        stop_ids=(end, *others, plain.eos_id),
        special_tokens={"eos_token": SPECIAL[template][0]},
        chat_template=ChatTemplate(template, origin="this test", special_tokens={}),
    )


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **fields):
    return {"role": "assistant", "content": content, **fields}
