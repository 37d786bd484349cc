# ruff: noqa: E501 (templates have the long lines of published ones)
"""Chat templates render as in Transformers: with the constructs that each family's template has."""

import json

import pytest
from extras import import_extra

from jaxrl.data.chat import ChatTemplate
from jaxrl.data.tokenizer import load_tokenizer, train_tokenizer
from jaxrl.errors import UserError

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter in <Köln> & 東京",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"type": "string", "enum": ["a", "b"]},
                "days": {"type": "array", "items": {"type": "integer"}, "nullable": True},
            },
            "required": ["where"],
        },
    },
}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call12345",
            "type": "function",
            "function": {"name": "weather", "arguments": {"where": "é", "days": [1, 2], "x": None}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "rain"}
ASKED = [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi\n"}]
THOUGHT = {"role": "assistant", "content": "4", "reasoning_content": "2 + 2\n"}
CHATS = {
    "question": ASKED[1:],
    "system": ASKED,
    "turns": [*ASKED, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}, ASKED[1]],
    "reasoning": [*ASKED, THOUGHT, ASKED[1]],
    "reasoning by another name": [*ASKED, {"role": "assistant", "content": "4", "reasoning": "m"}],
    "nulls": [*ASKED, {**CALL, "content": None, "name": None, "reasoning_content": None}, RESULT],
    "calls": [*ASKED, CALL, RESULT, RESULT, THOUGHT],
    "parts": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    ],
    "two users": [ASKED[1], ASKED[1]],
    "nobody": [{"role": "critic", "content": "no"}],
}

# DeepSeek's variable, and GLM's.
THINKS = {"thinking": True, "clear_thinking": False}
# Constructs of published templates, written anew.
TEMPLATES = {
    # Qwen2.5, Qwen3: namespaces, reversed lists, slices of messages, methods of texts, tests of types.
    "Qwen3": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and thought)) %}
            {{- 'A<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}{{- 'A' + content }}{%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- call.name }}{%- if call.arguments is string %}{{- call.arguments }}
            {%- else %}{{- call.arguments | tojson }}{%- endif %}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- content }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- else %}{{- message.role + '\\n' + content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    # Qwen3.5: a macro over parts of a content, arguments one by one.
    "Qwen3.5": """\
{%- macro shown(content, counted) %}
    {%- if content is string %}{{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or item.type == 'image' %}{{- raise_exception('no images') }}
            {%- elif 'text' in item %}{{- item.text }}
            {%- else %}{{- raise_exception('Unexpected item type in content.') }}{%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}{{- '' }}
    {%- else %}{{- raise_exception('Unexpected content type.') }}{%- endif %}
{%- endmacro %}
{%- if not messages %}{{- raise_exception('No messages provided.') }}{%- endif %}
{%- for m in messages %}{{- m.role + ':' + shown(m.content, true) | trim }}
{%- for c in m.tool_calls %}
{%- if c.function is defined %}{%- set c = c.function %}{%- endif %}
{%- for name, value in c.arguments | items %}
{{- '<parameter=' + name + '>' }}
{%- set value = value | tojson | safe if value is mapping or (value is sequence and value is not string) else value | string %}
{{- value + '</parameter>' }}
{%- endfor %}{%- endfor %}{%- endfor %}""",
    # Llama 3.1: a date, tools in the first message of the user, indented JSON.
    "Llama 3.1": """\
{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools_in_user_message is defined %}{%- set tools_in_user_message = true %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{%- if builtin_tools is defined or tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- date_string + system_message }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}{%- set first = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("no first user message") }}{%- endif %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}{{- first }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one call at once") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {%- for k, v in call.arguments.items() %}{{- k + '="' ~ v ~ '"' }}{%- if not loop.last %}, {% endif %}{%- endfor %}
        {{- '"parameters": ' }}{{- call.arguments | tojson }}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}""",
    # SmolLM3, Phi-4-reasoning: the assistant's turns in a block of their own, texts in variables.
    "SmolLM3": """\
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- if messages[0].role == "system" -%}
  {%- set system = messages[0].content -%}
  {%- if "/no_think" in system -%}{%- set mode = "/no_think" -%}{%- endif -%}
  {%- set custom = system.replace("/no_think", "").replace("/think", "").rstrip() -%}
{%- endif -%}
{%- set today = strftime_now("%B %Y") -%}
{{- today ~ mode ~ (custom | default("none")) -}}
{%- if tools -%}
  {%- set ns = namespace(text="<tools>") -%}
  {%- for tool in tools -%}{%- set ns.text = ns.text ~ (tool | string) ~ "\\n" -%}{%- endfor -%}
  {{ ns.text + "</tools>" }}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else "" -%}
  {%- if message.role == "user" -%}{{ "user\\n" + content + "<|im_end|>\\n" }}
  {%- elif message.role == "assistant" -%}
    {% generation %}
    {%- set content = content.lstrip("\\n") -%}
    {%- if mode == "/think" -%}{{ "A\\n" + content + "<|im_end|>\\n" }}
    {%- else -%}{{ "A<think>\\n\\n</think>\\n" + content }}{%- endif -%}
    {% endgeneration %}
  {%- endif -%}
  {{- content | length -}}
{%- endfor -%}
{% if add_generation_prompt %}{{ "assistant\\n" }}{% endif %}""",
    "generation alone": """\
{% for m in messages %}
{% generation %}
{{ loop.index }}: {{ m.role }}
    {%- generation -%} inner {%- endgeneration -%}
{% endgeneration %}
{% endfor %}""",
    # Mistral: alternating roles, tools without some of their keys, ids of nine letters.
    "Mistral": """\
{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- set users = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}{%- set ns.index = 0 %}
{%- for message in rest %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}{{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is defined %}{{- "[INST] " + system + "\\n\\n" + message["content"] }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {%- for call in message.tool_calls %}
            {%- set out = call.function|tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id|length != 9 %}{{- raise_exception("nine letters") }}{%- endif %}
            {{- ', "id": "' + call.id + '"}' }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token }}
    {%- elif message["role"] == "tool" or message["role"] == "tool_results" %}
        {%- if message.content is defined and message.content.content is defined %}
            {%- set content = message.content.content %}
        {%- else %}{%- set content = message.content %}{%- endif %}
        {{- '[TOOL_RESULTS] {"content": ' + content|string + "}" }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported") }}{%- endif %}
{%- endfor %}""",
    # Mistral Small 3, Ministral 3: a block set, dates, parts in the order of their types.
    "Ministral 3": """\
{%- set today = strftime_now("%Y-%m-%d") %}
{%- set default_system %}Today is {{ today }}.
Line two.{% endset %}
{%- if messages[0].role == 'system' %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{{- '[SYSTEM_PROMPT]' + default_system + '[/SYSTEM_PROMPT]' }}{%- endif %}
{%- set tools_definition = '' %}{%- set has_tools = false %}
{%- if tools is defined and tools is not none and tools|length > 0 %}
    {%- set has_tools = true %}
    {%- set tools_definition = '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' %}
{%- endif %}
{{- tools_definition }}
{%- for message in loop_messages %}
    {%- if message['content'] is string %}{{- message['content'] }}
    {%- elif message['content'] | length > 0 %}
        {%- set blocks = message['content'] | sort(attribute='type', reverse=true) %}
        {%- for block in blocks | selectattr('type', 'equalto', 'text') %}{{- block['text'] }}{%- endfor %}
    {%- endif %}
    {%- if message['tool_calls'] is defined and message['tool_calls']|length > 0 %}
        {%- for tool in message['tool_calls'] %}
            {%- set arguments = tool['function']['arguments'] %}
            {%- if arguments is not string %}{%- set arguments = arguments|tojson|safe %}
            {%- elif arguments == '' %}{%- set arguments = '{}' %}{%- endif %}
            {{- '[TOOL_CALLS]' + tool['function']['name'] + '[ARGS]' + arguments }}
        {%- endfor %}
    {%- endif %}
{%- endfor %}""",
    # Gemma 2 and 3: the system message before the first question, strict turns, trimmed texts.
    "Gemma 3": """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}{%- set role = "model" -%}
    {%- else -%}{%- set role = message['role'] -%}{%- endif -%}
    {{ '<start_of_turn>' + role + '\\n' + (prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}{{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{'<start_of_turn>model\\n'}}{%- endif -%}""",
    # Gemma 4: macros that call each other, sorted dictionaries, values in upper case, filtered loops.
    "Gemma 4": """\
{%- macro value_of(value, escape=True) -%}
    {%- if value is string -%}{{ '<|"|>' + value + '<|"|>' if escape else value }}
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}
        { {%- set ns = namespace(first=false) -%}
        {%- for key, item in value | dictsort -%}
            {%- if ns.first %},{% endif -%}{%- set ns.first = true -%}{{ key }}:{{ value_of(item) }}
        {%- endfor -%} }
    {%- elif value is sequence -%}
        [{%- for item in value -%}{{ value_of(item, escape) }}{%- if not loop.last %},{% endif -%}{%- endfor -%}]
    {%- else -%}{{ value }}{%- endif -%}
{%- endmacro -%}
{%- macro without_thinking(text) -%}
    {%- set ns = namespace(result='') -%}
    {%- for part in text.split('</think>') -%}
        {%- if '<think>' in part -%}{%- set ns.result = ns.result + part.split('<think>')[0] -%}
        {%- else -%}{%- set ns.result = ns.result + part -%}{%- endif -%}
    {%- endfor -%}
    {{- ns.result | trim -}}
{%- endmacro -%}
{{ bos_token }}
{%- for tool in tools or [] %}
    {%- set f = tool['function'] -%}{%- set ignored = ['description'] -%}
    {{ f['name'] ~ f['parameters']['type'] | upper }}
    {%- for key, item in f['parameters']['properties'] | dictsort if key not in ignored -%}
        {{ key }}:{{ value_of(item) }}{{ 'nullable' if item['nullable'] }}
    {%- endfor -%}
{%- endfor %}
{%- for message in messages -%}
    {%- set captured -%}
        {%- if message['content'] is string -%}{{ without_thinking(message['content']) }}{%- endif -%}
    {%- endset -%}
    {{ captured }}{% if captured | trim | length > 0 %}<turn|>{% endif %}
    {%- for call in message.get('tool_calls', []) -%}
        {%- set arguments = call['function']['arguments'] -%}{{ value_of(arguments, escape=False) }}
    {%- endfor -%}
    {%- set count = namespace(n=0) -%}
    {%- for later in messages[loop.index:] -%}
        {%- if later['role'] != 'tool' -%}{%- break -%}{%- endif -%}
        {%- if later['content'] == '' -%}{%- continue -%}{%- endif -%}
        {%- set count.n = count.n + 1 -%}
    {%- endfor -%}
    {{ count.n }}
{%- endfor -%}""",
    # OLMo 3: fields that a message may have, the end of sequence after the last answer alone.
    "OLMo 3": """\
{%- set has_system = messages|selectattr('role', 'equalto', 'system')|list|length > 0 -%}
{%- if not has_system -%}{{ '<|im_start|>system\\nYou are OLMo. ' }}
{%- if tools is none or (tools | length) == 0 -%}{{ 'No functions.' }}
{%- else -%}{{ '<functions>' + (tools | map(attribute='function') | list | tojson) + '</functions>' }}{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message.get('functions', none) is not none -%}{{ message['functions'] }}{%- endif -%}
{%- if message['role'] == 'assistant' -%}
{{ message['content'] if message.get('content', none) is not none }}
{%- if not loop.last -%}{{ '<|im_end|>' + '\\n' }}{%- else -%}{{ eos_token }}{%- endif -%}
{%- else -%}{{ message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{%- endif -%}
{%- if loop.last and add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
{%- endfor -%}""",
    # gpt-oss: macros with lists and defaults, reasoning as `thinking`, effort in the system message.
    "gpt-oss": """\
{%- macro type_of(spec, required, nullable=false) -%}
    {%- if spec.type == "array" -%}
        {%- if spec['items'] -%}{{ type_of(spec['items'], required) + "[]" }}{%- else -%}any[]{%- endif -%}
        {%- if spec.nullable -%}{{ " | null" }}{%- endif -%}
    {%- elif spec.type is iterable and spec.type is not string and spec.type[0] -%}{{ spec.type|join(" | ") }}
    {%- elif spec.enum -%}{{ '"' + spec.enum|join('" | "') + '"' }}
    {%- elif spec.type == "integer" or spec.type == "number" -%}number
    {%- else -%}{{ spec.type|replace("string", "str")|first }}{%- endif -%}
{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
{%- if model_identity is not defined %}{%- set model_identity = "You are a model." %}{%- endif %}
{{- model_identity + "\\n" + strftime_now("%Y-%m-%d") + "Reasoning: " + reasoning_effort }}
{%- if tools -%}{%- for tool in tools -%}
    {%- set tool = tool.function %}{{- "type " + tool.name + " = (_: {\\n" }}
    {%- for name, spec in tool.parameters.properties.items() %}
        {{- name }}{%- if name not in (tool.parameters.required or []) %}?{%- endif %}{{- ": " + type_of(spec, []) + ",\\n" }}
    {%- endfor %}
{%- endfor %}{%- endif %}
{%- set last = namespace(call=none) %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if "content" in message and "<|channel|>" in message.content %}{{- raise_exception("a channel") }}{%- endif %}
        {%- if "tool_calls" in message %}
            {%- set later = namespace(found=false) %}
            {%- for m in messages[loop.index:] %}
                {%- if m.role == 'assistant' and "tool_calls" not in m %}{%- set later.found = true %}{%- endif %}
            {%- endfor %}
            {%- set call = message.tool_calls[0] %}{%- if call.function %}{%- set call = call.function %}{%- endif %}
            {%- if message.content and message.thinking %}{{- raise_exception("both") }}
            {%- elif message.thinking and not later.found %}{{- "analysis:" + message.thinking }}{%- endif %}
            {{- (call.content_type if call.content_type is defined else "json") + call.arguments|tojson }}
            {%- set last.call = call.name %}
        {%- elif loop.last and not add_generation_prompt %}
            {%- if "thinking" in message %}{{- "analysis:" + message.thinking }}{%- endif %}{{- message.content }}
        {%- else %}{{- "final:" + message.content }}{%- set last.call = none %}{%- endif %}
    {%- elif message.role == 'tool' -%}
        {%- if last.call is none %}{{- raise_exception("no call before") }}{%- endif %}
        {{- "functions." + last.call + message.content|tojson }}
    {%- else %}{{- message.content }}{%- endif %}
{%- endfor -%}""",
    # GLM-4.5 to 5: JSON with options, parts by a macro, `continue`.
    "GLM-4.5": """\
[gMASK]<sop>
{%- if tools -%}
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{{ tool | tojson(ensure_ascii=True, indent=2, sort_keys=True) }}
{{ tool.function | tojson(separators=(',', ':')) }}
{% endfor %}
{%- endif -%}
{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{% set ns.last_user_index = loop.index0 -%}{%- endif %}{%- endfor %}
{% for m in messages %}
{%- if m.role == 'system' -%}{%- continue -%}{%- endif -%}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{{- '/nothink' if (enable_thinking is defined and not enable_thinking and not visible_text(m.content).endswith("/nothink")) else '' -}}
{%- elif m.role == 'assistant' -%}<|assistant|>
{%- set reasoning_content = '' %}{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}{%- set reasoning_content = m.reasoning_content %}{%- endif %}
{%- if loop.index0 > ns.last_user_index and reasoning_content -%}{{ '\\n<think>' + reasoning_content.strip() + '</think>' }}
{%- else -%}{{ '\\n<think></think>' }}{%- endif -%}
{%- if content.strip() -%}{{ '\\n' + content.strip() }}{%- endif -%}
{% if m.tool_calls %}{% for tc in m.tool_calls %}{%- if tc.function %}{%- set tc = tc.function %}{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments %}
{% for k, v in _args.items() %}<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
{% endfor %}{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|observation|>' }}{%- endif %}
{{- m.content }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}{%- endif -%}""",
    # DeepSeek-V3, Moonlight: a flag that is set if it is missing, tests against none, nested namespaces.
    "DeepSeek-V3": """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}
{%- endif %}{%- endfor %}{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{ '<|User|>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}
{%- if not ns.is_first %}{{ '<|Assistant|>' + tool['type'] + tool['function']['name'] + '\\n' + '```json' + '\\n' ~ tool['function']['arguments'] }}
{%- set ns.is_first = true -%}{%- else %}{{ '\\n' + tool['type'] }}{%- endif %}
{%- endfor %}{%- endif %}
{%- if message['role'] == 'assistant' and (message['content'] is not none) and message['tool_calls'] is not defined %}
{%- set content = message['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}{{ '<|Assistant|>' + content + eos_token }}
{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}{{ '<|tool|>' + message['content'] }}{%- endif %}
{%- endfor -%}
{% if ns.is_tool %}{{ '<|end|>' }}{% endif %}{% if add_generation_prompt and not ns.is_tool %}{{ '<|Assistant|>' }}{% endif %}""",
    # Phi-4-mini: tools in the system message, spelled out by whoever calls.
    "Phi-4-mini": (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
        "message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|tool|>' + "
        "message['tools'] + '<|/tool|>' }}{% else %}{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    # Phi-4: one line of branches by role, texts joined by plus.
    "Phi-4": (
        "{% for message in messages %}{% if (message['role'] == 'system') %}{{'<|start|>system<|sep|>' + "
        "message['content'] + '<|end|>'}}{% elif (message['role'] == 'user') %}{{'<|start|>user<|sep|>' + "
        "message['content'] + '<|end|>'}}{% elif (message['role'] == 'assistant') %}{{'<|start|>assistant<|sep|>' "
        "+ message['content'] + '<|end|>'}}{% endif %}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start|>assistant<|sep|>' }}{% endif %}"
    ),
    # Qwen2.5: conditions over several lines, names set anew in a loop, neighbours of a message.
    "Qwen2.5": """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'A helper.' }}
    {%- endif %}
    {{- "\\n\\n# Tools\\nwithin <tools></tools> tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n{\\"name\\": <name>, \\"arguments\\": <json>}<|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>system\\nA helper.<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first)
        or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}""",
    # Qwen3-Next: parts of a content by a macro that counts, steps after the last question, thinking opened.
    "Qwen3-Next": """\
{%- macro text_of(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content or [] %}{{- part.text if part.text is defined else '' }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not (text_of(message.content) | trim).startswith('<tool_response>') %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = text_of(message.content) %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' ~ message.role ~ '\\n' ~ content ~ '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set thought = message.reasoning_content %}
        {%- else %}
            {%- set thought = (content.split('</think>')[0]).split('<think>')[-1].strip('\\n') if '</think>' in content else '' %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls if message.tool_calls %}
            {{- '\\n<tool_call>' + (call.function if call.function else call) | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}""",
    # GLM-4.6: results that may be lists, reasoning kept by a variable, defaults of missing arguments.
    "GLM-4.6": """\
[gMASK]<sop>
{%- macro visible_text(content) -%}
    {%- if content is string -%}
        {{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}
                {{- item.text }}
            {%- elif item is string -%}
                {{- item }}
            {%- elif item is mapping and item.type in ['image', 'image_url'] -%}
                <|begin_of_image|>
            {%- endif -%}
        {%- endfor -%}
    {%- elif content is none -%}
        {{- '' }}
    {%- else -%}
        {{- content }}
    {%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last_user_index=-1, num_turns=0) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ns.last_user_index = loop.index0 -%}
        {%- set ns.num_turns = ns.num_turns + 1 -%}
    {%- endif %}
{%- endfor %}
{{- ns.num_turns }}
{% for m in messages %}
{%- if m.role == 'user' -%}<|user|>
{{ visible_text(m.content) }}
{%- elif m.role == 'assistant' -%}
<|assistant|>
{%- set reasoning_content = '' %}
{%- set content = visible_text(m.content) %}
{%- if m.reasoning_content is string %}
    {%- set reasoning_content = m.reasoning_content %}
{%- else %}
    {%- if '</think>' in content %}
        {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
{%- endif %}
{%- if ((clear_thinking is defined and not clear_thinking) or loop.index0 > ns.last_user_index) and reasoning_content -%}
{{ '\\n<think>' + reasoning_content.strip() + '</think>'}}
{%- else -%}
{{ '\\n<think></think>' }}
{%- endif -%}
{%- if content.strip() -%}
{{ '\\n' + content.strip() }}
{%- endif -%}
{% if m.tool_calls %}
{% for tc in m.tool_calls %}
{%- if tc.function %}
    {%- set tc = tc.function %}
{%- endif %}
{{ '\\n<tool_call>' + tc.name }}
{% set _args = tc.arguments or {} %}
{% for k, v in _args.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v if v is string else v | tojson(ensure_ascii=False) }}</arg_value>
{% endfor %}
</tool_call>{% endfor %}
{% endif %}
{%- elif m.role == 'tool' -%}
{%- if m.content is string -%}
{%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
    {{- '<|observation|>' }}
{%- endif %}
{{- '\\n<tool_response>\\n' }}
{{- m.content }}
{{- '\\n</tool_response>' }}
{%- else -%}
<|observation|>{% for tr in m.content %}

<tool_response>
{{ tr.output if tr.output is defined else tr }}
</tool_response>{% endfor -%}
{% endif -%}
{%- elif m.role == 'system' -%}
<|system|>
{{ visible_text(m.content) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    <|assistant|>{{- '\\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' -}}
{%- endif -%}""",
    # DeepSeek-V3.1 to V3.2-Exp: texts of tools grow in a namespace, prefixes, splits with a limit, two modes.
    "DeepSeek-V3.2": """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% if not thinking is defined %}{% set thinking = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, system_prompt='', is_first_sp=true, is_last_user=false) %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- if ns.is_first_sp %}{% set ns.system_prompt = ns.system_prompt + message['content'] %}{% set ns.is_first_sp = false %}
{%- else %}{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + message['content'] %}{%- endif %}
{%- endif %}{%- endfor %}
{% if tools is defined and tools is not none %}
{% set tool_ns = namespace(text='## Tools\\n') %}
{% for tool in tools %}
{% set tool_ns.text = tool_ns.text + '\\n### ' + tool.function.name + '\\n' + tool.function.description + '\\nParameters: ' + (tool.function.parameters | tojson) + '\\n' %}
{% endfor %}
{% set ns.system_prompt = ns.system_prompt + '\\n\\n' + tool_ns.text %}
{% endif %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{%- set ns.is_first = false -%}{%- set ns.is_last_user = true -%}{{'<|User|>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
{%- if ns.is_last_user %}{{'<|Assistant|></think>'}}{%- endif %}
{%- set ns.is_last_user = false -%}{%- set ns.is_first = false %}{%- set ns.is_tool = false -%}
{%- for tool in message['tool_calls'] %}
{%- if not ns.is_first %}
{%- if message['content'] is none %}{{'<calls><call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments']|tojson + '</call>'}}
{%- else %}{{message['content'] + '<calls><call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments']|tojson + '</call>'}}{%- endif %}
{%- set ns.is_first = true -%}
{%- else %}{{'<call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments']|tojson + '</call>'}}{%- endif %}
{%- endfor %}{{'</calls>' + eos_token}}
{%- endif %}
{%- if message['role'] == 'assistant' and (message['tool_calls'] is not defined or message['tool_calls'] is none) %}
{%- if ns.is_last_user %}{{'<|Assistant|>'}}
{%- if message['prefix'] is defined and message['prefix'] and thinking %}{{'<think>'}}{%- else %}{{'</think>'}}{%- endif %}
{%- endif %}
{%- set ns.is_last_user = false -%}
{%- if ns.is_tool %}{{message['content'] + eos_token}}{%- set ns.is_tool = false -%}
{%- else %}
{%- set content = message['content'] -%}
{%- if '</think>' in content %}{%- set content = content.split('</think>', 1)[1] -%}{%- endif %}
{{content + eos_token}}
{%- endif %}
{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_last_user = false -%}{%- set ns.is_tool = true -%}{{'<output>' + message['content'] + '</output>'}}{%- endif %}
{%- endfor -%}
{%- if add_generation_prompt and ns.is_last_user and not ns.is_tool %}{{'<|Assistant|>'}}{%- if not thinking %}{{'</think>'}}{%- else %}{{'<think>'}}{%- endif %}{% endif %}""",
    # What is in the environment without being in these.
    "environment": """\
{{ dict(a=1) | tojson }}{{ dict.fromkeys(['x'], 2) }}
{{ tools is none }} {{ documents is none }} {{ documents is defined }} {{ unk_token is defined }}{{ nothing }}
{{ '<a & b>' | e }} {{ '<a & b>' | tojson }} {{ [1, 2.5, true, none] | tojson(indent='..') }}
{% for i in range(9) %}
  {% if i == 2 %}{% continue %}{% endif %}
  {% if i == 5 %}{% break %}{% endif %}
{{ i }}{{ cycler('a', 'b').next() }}{{ loop.cycle('x', 'y') }}{{ joiner(', ')() }}
{% endfor %}
{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}
{{ messages | map(attribute='role') | unique | join('/') }} {{ lipsum is defined }}
{%+ if true %} kept{% endif +%}
{# a comment #}{% raw %}{{ raw }}{% endraw %}{% filter upper %}abc{% endfilter %}""",
}


def rendered(render, *args, **kwargs):
    """The text, or that there is none: which words an error has is each library's own."""
    try:
        return render(*args, **kwargs)
    except Exception as error:
        # Ours are all of one kind, so nothing else is taken for a refusal.
        assert isinstance(error, UserError) or "transformers" in render.__module__
        return "refused"


@pytest.mark.parametrize("family", TEMPLATES)
def test_a_template_renders_as_in_transformers(family):
    utils = import_extra("parity", "transformers.utils.chat_template_utils")

    def theirs(messages, *, tools=None, add_generation_prompt, **kwargs):
        messages = utils._normalize_chat_messages(messages)
        texts, _ = utils.render_jinja_template(
            [messages],
            tools=tools,
            chat_template=TEMPLATES[family],
            add_generation_prompt=add_generation_prompt,
            **TOKENS,
            **kwargs,
        )
        return texts[0]

    theirs.__module__ = "transformers"
    ours = ChatTemplate(TEMPLATES[family], origin="a test", special_tokens=TOKENS).render
    texts = []
    for messages in CHATS.values():
        for tools in ({}, {"tools": [TOOL, TOOL]}):
            for kwargs in ({}, {"enable_thinking": False}, THINKS, {"reasoning_effort": "high"}):
                for end in (True, False):
                    given = {**tools, **kwargs, "add_generation_prompt": end}
                    text = rendered(ours, messages, **given)
                    assert text == rendered(theirs, messages, **given)
                    texts.append(text)
    # Most chats are rendered: a template that refuses all compares nothing.
    assert texts.count("refused") <= len(texts) // 2


def test_a_generation_block_is_its_content():
    source = "{% for m in messages %}\n{% generation %}\n<{{ m.content }}>\n{% endgeneration %}\n{% endfor %}"
    template = ChatTemplate(source, origin="a test", special_tokens={})
    assert template.render([{"content": "a"}, {"content": "b"}]) == "<a>\n<b>\n"


def test_json_has_the_options_of_transformers():
    source = (
        "{{ x | tojson }} {{ x | tojson(ensure_ascii=True) }} {{ x | tojson(separators=(',', ':')) }} "
        "{{ x | tojson(sort_keys=True, indent=1) }}"
    )
    template = ChatTemplate(source, origin="a test", special_tokens={})
    assert template.render([], x={"b": "é<", "a": 1}) == (
        '{"b": "é<", "a": 1} {"b": "\\u00e9<", "a": 1} {"b":"é<","a":1} {\n "a": 1,\n "b": "é<"\n}'
    )


# Files


TOKENIZER = train_tokenizer(["a chat"], vocab_size=258)
BROKEN = "{% if %}"


def write(directory, files, key=None):
    """A tokenizer's directory with these files, and this value of the key `chat_template`."""
    TOKENIZER.save(directory)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    config |= {} if key is None else {"chat_template": key}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return directory


def named(**templates):
    return [{"name": name, "template": text} for name, text in templates.items()]


MORE = "additional_chat_templates/"
PLACES = [
    # files, the key, the text without and with tools; None for an error
    ({}, "K", "K", "K"),
    ({"chat_template.jinja": "J"}, "K", "J", "J"),
    ({}, named(default="D", tool_use="T"), "D", "T"),
    ({}, named(tool_use="T", rag="R", default="D"), "D", "T"),
    ({}, named(tool_use="T"), None, "T"),
    ({}, named(rag="R"), None, None),
    ({"chat_template.jinja": "J", f"{MORE}tool_use.jinja": "T"}, None, "J", "T"),
    ({"chat_template.jinja": "J", f"{MORE}rag.jinja": "R"}, "K", "J", "J"),
    ({f"{MORE}tool_use.jinja": "T"}, None, None, "T"),
    ({"chat_template.jinja": "J"}, named(default="D", tool_use="T"), "J", "J"),
    ({"chat_template.jinja": "J", f"{MORE}tool_use.jinja": BROKEN}, None, "J", None),
    ({"chat_template.jinja": BROKEN, f"{MORE}tool_use.jinja": "T"}, None, None, "T"),
    ({}, BROKEN, None, None),
    ({}, None, None, None),
]


@pytest.mark.parametrize(("files", "key", "plain", "with_tools"), PLACES)
def test_templates_are_chosen_as_in_transformers(files, key, plain, with_tools, tmp_path):
    directory = write(tmp_path, files, key)
    loaded = load_tokenizer(directory)
    loaded.save(tmp_path / "saved")
    chat = [{"role": "user", "content": "a"}]
    for tokenizer in (loaded, load_tokenizer(tmp_path / "saved")):
        for tools, text in (({}, plain), ({"tools": [TOOL]}, with_tools)):
            if text is None:
                with pytest.raises(UserError):
                    tokenizer.render_chat(chat, **tools)
            else:
                assert tokenizer.render_chat(chat, **tools) == text
    transformers = import_extra("parity", "transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(directory)
    for tools, text in ((None, plain), ([TOOL], with_tools)):
        if text is None:
            with pytest.raises(Exception, match=r"chat template|jinja|identifier|Expected"):
                theirs.apply_chat_template(chat, tools=tools, tokenize=False)
        else:
            assert theirs.apply_chat_template(chat, tools=tools, tokenize=False) == text


def test_the_file_of_processors_is_read_if_there_is_no_other(tmp_path):
    files = {"chat_template.json": json.dumps({"chat_template": "P"})}
    assert load_tokenizer(write(tmp_path, files)).render_chat([]) == "P"
    assert load_tokenizer(write(tmp_path, files, "K")).render_chat([]) == "K"


def test_a_template_is_named_by_a_setting(tmp_path):
    write(tmp_path, {f"{MORE}rag.jinja": "R", "own.jinja": "O"})
    assert load_tokenizer(tmp_path, chat_template="rag").render_chat([]) == "R"
    assert load_tokenizer(tmp_path, chat_template=tmp_path / "own.jinja").render_chat([]) == "O"
    with pytest.raises(UserError, match="none is called default; name the one to use"):
        load_tokenizer(tmp_path).render_chat([])


@pytest.mark.parametrize(
    ("files", "key", "message"),
    [
        ({}, BROKEN, "does not compile"),
        ({}, 5, "no chat template that can be read"),
        ({}, [{"name": "default"}], "no chat template that can be read"),
        ({}, named(default=None), "no chat template that can be read"),
        ({"chat_template.json": "{"}, None, "chat_template.json"),
        ({"chat_template.json": '{"chat_template": [1]}'}, None, "no chat template that can be"),
    ],
)
def test_a_broken_template_matters_where_it_renders(files, key, message, tmp_path):
    tokenizer = load_tokenizer(write(tmp_path, files, key))
    assert tokenizer.decode(tokenizer.encode("1 + 1")) == "1 + 1"
    with pytest.raises(UserError, match=message) as caught:
        tokenizer.render_chat([])
    assert "\n" not in str(caught.value)


def test_special_tokens_of_a_model_have_names_in_its_template(tmp_path):
    write(tmp_path, {}, "{{ image_token }}{{ eos_token }}")
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"extra_special_tokens": {"image_token": "<img>"}}
    path.write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).render_chat([]) == "<img><eos>"
