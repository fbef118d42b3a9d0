"""What the engine sees in a dialogue, for each family, written out.

A line that begins with ``·`` is given (mask 0), one with ``+`` is sampled (mask 1); ``«...»`` is a control token, all
else is bytes. A dialogue is always: a question, a call, its result, an answer, a second question, an answer. A list of
lines is a segment.
"""

SCHEMA = (
    '{"type": "function", "function": {"name": "search", "parameters": '
    '{"type": "object", "properties": {"query": {"type": "string"}}}}}'
)
QWEN_CALL = '«<tool_call>»\n{"name": "search", "arguments": {"query": "x"}}\n«</tool_call>»'
QWEN_HEAD = (
    f"·«<|im_start|>»system\nBe brief.\n\n# Tools\n<tools>\n{SCHEMA}\n</tools>\nCalls: «<tool_call>»\n"
    '{"name": ..., "arguments": ...}\n«</tool_call>»«<|im_end|>»\n'
    "«<|im_start|>»user\nwho?«<|im_end|>»\n«<|im_start|>»assistant\n"
)
QWEN_RESULT = "\n«<|im_start|>»user\n«<tool_response>»\nAnn\n«</tool_response>»«<|im_end|>»\n«<|im_start|>»assistant\n"
QWEN_AGAIN = "\n«<|im_start|>»user\nsure?«<|im_end|>»\n«<|im_start|>»assistant\n"
GLM_CALL = "\n«<tool_call>»search\n«<arg_key>»query«</arg_key>»\n«<arg_value>»x«</arg_value>»\n«</tool_call>»"
GLM_HEAD = (
    f"·«[gMASK]»«<sop>»«<|system|>»\n# Tools\n<tools>\n{SCHEMA}\n</tools>\nCalls: «<tool_call>»{{name}}\n"
    "«<arg_key>»{key}«</arg_key>»\n«<arg_value>»{value}«</arg_value>»\n«</tool_call>»"
    "«<|system|>»\nBe brief.«<|user|>»\nwho?«<|assistant|>»"
)
LLAMA_TOOL = """{
    "type": "function",
    "function": {
        "name": "search",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {
                    "type": "string"
                }
            }
        }
    }
}"""
LLAMA_ASSISTANT = "«<|start_header_id|>»assistant«<|end_header_id|>»\n\n"
DEEPSEEK_CALL = (
    "«<｜tool▁calls▁begin｜>»«<｜tool▁call▁begin｜>»function«<｜tool▁sep｜>»search\n```json\n"
    '{"query": "x"}\n```«<｜tool▁call▁end｜>»«<｜tool▁calls▁end｜>»«<｜end▁of▁sentence｜>»'
)
DEEPSEEK_RESULT = (
    "«<｜tool▁outputs▁begin｜>»«<｜tool▁output▁begin｜>»Ann«<｜tool▁output▁end｜>»«<｜tool▁outputs▁end｜>»"
)
DEEPSEEK_HEAD = "·«<｜begin▁of▁sentence｜>»Be brief.«<｜User｜>»who?«<｜Assistant｜>»"
KIMI_CALL = (
    "«<|tool_calls_section_begin|>»«<|tool_call_begin|>»functions.search:0«<|tool_call_argument_begin|>»"
    '{"query": "x"}«<|tool_call_end|>»«<|tool_calls_section_end|>»«<|im_end|>»'
)
KIMI_ASSISTANT = "«<|im_assistant|>»assistant«<|im_middle|>»"
MISTRAL_CALL = '«[TOOL_CALLS]» [{"name": "search", "arguments": {"query": "x"}, "id": "a1b2c3d4e"}]«</s>»'
MISTRAL_RESULT = '«[TOOL_RESULTS]» {"content": Ann, "call_id": "a1b2c3d4e"}«[/TOOL_RESULTS]»'

DIALOGUES = {
    "qwen2.5": [
        [
            QWEN_HEAD,
            f"+I look.\n{QWEN_CALL}«<|im_end|>»",
            "·" + QWEN_RESULT,
            "+It is Ann.«<|im_end|>»",
            "·" + QWEN_AGAIN,
            "+Yes.«<|im_end|>»",
        ]
    ],
    # Reasoning is kept while tools answer, and stripped when the user speaks again: a second segment.
    "qwen3": [
        [
            QWEN_HEAD,
            f"+«<think>»\nhm\n«</think>»\n\n{QWEN_CALL}«<|im_end|>»",
            "·" + QWEN_RESULT,
            "+«<think>»\nso\n«</think>»\n\nIt is Ann.«<|im_end|>»",
        ],
        [
            f"{QWEN_HEAD}{QWEN_CALL}«<|im_end|>»{QWEN_RESULT}It is Ann.«<|im_end|>»{QWEN_AGAIN}",
            "+«<think>»\nsure\n«</think>»\n\nYes.«<|im_end|>»",
        ],
    ],
    # A turn ends by the role token of the next one, which is sampled, and not given a second time.
    "glm4.5": [
        [
            GLM_HEAD,
            f"+\n«<think>»hm«</think>»{GLM_CALL}«<|observation|>»",
            "·\n«<tool_response>»\nAnn\n«</tool_response>»«<|assistant|>»",
            "+\n«<think>»so«</think>»\nIt is Ann.«<|user|>»",
        ],
        [
            f"{GLM_HEAD}\n«<think>»«</think>»{GLM_CALL}«<|observation|>»\n«<tool_response>»\nAnn\n«</tool_response>»"
            "«<|assistant|>»\n«<think>»«</think>»\nIt is Ann.«<|user|>»\nsure?«<|assistant|>»",
            "+\n«<think>»«</think>»\nYes.«<|user|>»",
        ],
    ],
    "llama3": [
        [
            "·«<|begin_of_text|>»«<|start_header_id|>»system«<|end_header_id|>»\n\nEnvironment: ipython\n"
            "Today Date: 26 Jul 2024\n\nBe brief.«<|eot_id|>»«<|start_header_id|>»user«<|end_header_id|>»\n\n"
            'Answer with {"name": function, "parameters": arguments}.\n\n'
            f"{LLAMA_TOOL}\n\nwho?«<|eot_id|>»{LLAMA_ASSISTANT}",
            '+{"name": "search", "parameters": {"query": "x"}}«<|eot_id|>»',
            f'·«<|start_header_id|>»ipython«<|end_header_id|>»\n\n"Ann"«<|eot_id|>»{LLAMA_ASSISTANT}',
            "+It is Ann.«<|eot_id|>»",
            f"·«<|start_header_id|>»user«<|end_header_id|>»\n\nsure?«<|eot_id|>»{LLAMA_ASSISTANT}",
            "+Yes.«<|eot_id|>»",
        ]
    ],
    "deepseek_v3": [
        [
            DEEPSEEK_HEAD,
            f"+I look.{DEEPSEEK_CALL}",
            f"·{DEEPSEEK_RESULT}",
            "+It is Ann.«<｜end▁of▁sentence｜>»",
            "·«<｜User｜>»sure?«<｜Assistant｜>»",
            "+Yes.«<｜end▁of▁sentence｜>»",
        ]
    ],
    # Reasoning is opened by the template, save after a tool, and dropped from every turn that is over.
    "deepseek_r1": [
        [f"{DEEPSEEK_HEAD}«<think>»\n", f"+hm\n«</think>»\n\n{DEEPSEEK_CALL}"],
        [
            f"{DEEPSEEK_HEAD}{DEEPSEEK_CALL}{DEEPSEEK_RESULT}",
            "+It is Ann.«<｜end▁of▁sentence｜>»",
            "·«<｜User｜>»sure?«<｜Assistant｜>»«<think>»\n",
            "+sure\n«</think>»\n\nYes.«<｜end▁of▁sentence｜>»",
        ],
    ],
    "kimi_k2": [
        [
            f"·«<|im_system|>»tool_declare«<|im_middle|>»[{SCHEMA}]«<|im_end|>»"
            "«<|im_system|>»system«<|im_middle|>»Be brief.«<|im_end|>»"
            f"«<|im_user|>»user«<|im_middle|>»who?«<|im_end|>»{KIMI_ASSISTANT}",
            f"+I look.{KIMI_CALL}",
            "·«<|im_system|>»search«<|im_middle|>»## Return of functions.search:0\nAnn«<|im_end|>»" + KIMI_ASSISTANT,
            "+It is Ann.«<|im_end|>»",
            f"·«<|im_user|>»user«<|im_middle|>»sure?«<|im_end|>»{KIMI_ASSISTANT}",
            "+Yes.«<|im_end|>»",
        ]
    ],
    # The tools stand at the last question, so they move when the user speaks again: a second segment.
    "mistral": [
        [
            f"·«<s>»«[AVAILABLE_TOOLS]» [{SCHEMA}]«[/AVAILABLE_TOOLS]»«[INST]» who?«[/INST]»",
            f"+{MISTRAL_CALL}",
            f"·{MISTRAL_RESULT}",
            "+ It is Ann.«</s>»",
        ],
        [
            f"·«<s>»«[INST]» who?«[/INST]»{MISTRAL_CALL}{MISTRAL_RESULT} It is Ann.«</s>»"
            f"«[AVAILABLE_TOOLS]» [{SCHEMA}]«[/AVAILABLE_TOOLS]»«[INST]» sure?«[/INST]»",
            "+ Yes.«</s>»",
        ],
    ],
}
