"""Chat templates in the shapes of published families, with special tokens in their styles; written for the tests."""

from typing import NamedTuple


class Family(NamedTuple):
    """A template and the special tokens it writes."""

    template: str
    specials: tuple[str, ...]
    bos: str = ""
    eos: str = ""


def _each(body: str, head: str = "", tail: str = "") -> str:
    return head + "{% for m in messages %}" + body + "{% endfor %}" + tail


IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>")
COHERE = ("<BOS>", "<|START|>", "<|STOP|>", "<|SYS|>", "<|USR|>", "<|BOT|>")
SENTENCE = ("<s>", "</s>", "<unk>")
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
INST = ("<s>", "</s>", "[INST]", "[/INST]", "[SYS]", "[/SYS]")

FAMILIES: dict[str, Family] = {
    "chatml": Family(
        _each(
            "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n",
            tail="{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ),
        IM,
    ),
    "qwen": Family(
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}"
        + _each(
            "{% set c = m.content.split('</think>')[-1].lstrip('\\n') if m.role == 'assistant' else m.content %}"
            "{{ '<|im_start|>' ~ m.role ~ '\n' ~ c ~ '<|im_end|>\n' }}",
            tail="<|im_start|>assistant\n",
        ),
        IM,
    ),
    "llama2": Family(
        "{% if messages[0].role == 'system' %}{% set s = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set s = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if m.role == 'user' %}"
        "{{ bos_token + '[INST] ' + ((s + m.content) if loop.first else m.content).strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}",
        SENTENCE,
        "<s>",
        "</s>",
    ),
    "llama3": Family(
        _each(
            "{% set c = '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' %}"
            "{% if loop.first %}{% set c = bos_token + c %}{% endif %}{{ c }}",
            tail="{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}",
        ),
        LLAMA3,
        "<|begin_of_text|>",
        "<|eot_id|>",
    ),
    "mistral": Family(
        "{{ bos_token }}"
        + _each(
            "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'system' %}[SYS]"
            "{{ m.content }}[/SYS]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
        ),
        INST,
        "<s>",
        "</s>",
    ),
    "zephyr": Family(
        _each("{{ '<|' + m.role + '|>\n' + m.content + eos_token }}\n", tail="{{ '<|assistant|>' }}\n"),
        (*PHI, "</s>"),
        "",
        "</s>",
    ),
    "phi3": Family(
        _each("{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}", tail="{{ '<|assistant|>\n' }}"), PHI
    ),
    "gemma": Family(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set first = messages[0].content | trim + '\n\n' %}"
        "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% set r = 'model' if m.role == 'assistant' else m.role %}"
        "<start_of_turn>{{ r }}\n{{ first if loop.first else '' }}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "<start_of_turn>model\n",
        GEMMA,
        "<bos>",
        "<eos>",
    ),
    "deepseek": Family(
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
        "{% endif %}{% endfor %}{{ bos_token }}{{ ns.s }}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
        "{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{{ '<｜Assistant｜>' + c + '<｜end▁of▁sentence｜>' }}{% endif %}{% endfor %}<｜Assistant｜><think>\n",
        DEEPSEEK,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "command": Family(
        "{{ bos_token }}"
        + _each(
            "{% set r = {'system': '<|SYS|>', 'user': '<|USR|>', 'assistant': '<|BOT|>'}[m.role] %}"
            "{{ '<|START|>' + r + m.content.strip() + '<|STOP|>' }}",
            tail="{{ '<|START|><|BOT|>' }}",
        ),
        COHERE,
        "<BOS>",
    ),
    "vicuna": Family(
        _each(
            "{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %} USER: {{ m.content }}"
            "{% else %} ASSISTANT: {{ m.content }}{{ eos_token }}{% endif %}",
            "{{ bos_token }}",
            " ASSISTANT:",
        ),
        SENTENCE,
        "<s>",
        "</s>",
    ),
    "alpaca": Family(
        _each(
            "{% if m.role == 'system' %}{{ m.content }}\n\n{% elif m.role == 'user' %}### Task:\n{{ m.content }}\n\n"
            "{% else %}### Reply:\n{{ m.content }}{{ eos_token }}\n\n{% endif %}",
            tail="### Reply:\n",
        ),
        ("<s>", "</s>"),
        "",
        "</s>",
    ),
    "joined": Family(  # all messages in one string
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m.content %}{% endfor %}"
        "<|im_start|>{{ ns.t }}<|im_end|>",
        IM,
    ),
    "replaced": Family(_each("<|im_start|>{{ m.content | replace('~', '') }}<|im_end|>"), IM),
    "lowered": Family(_each("<|im_start|>{{ m.content | lower }}<|im_end|>\n"), IM),
    "uppered": Family(_each("<BOS>{{ m.content | upper }}<|STOP|>"), COHERE),
    "sliced": Family(_each("<|im_start|>{{ m.content[1:] }}<|im_end|>{{ m.content | length }}"), IM),
    "bracketed": Family(_each("[INST]<{{ m.content }}>[{{ m.content }}]<|{{ m.content }}|>[/INST]"), (*INST, *IM)),
    "quoted": Family("<s>{{ messages | tojson }}{{ messages[0] }}</s>" + _each("{{ m | tojson }}</s>"), SENTENCE),
    "reversed": Family(
        _each("<s>{{ m.content | reverse }}{{ m.content | title }}{{ m.content.split('x') | join }}</s>"), SENTENCE
    ),
}
