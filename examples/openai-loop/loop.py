"""An agent of one tool on the OpenAI SDK. Nothing here knows of rolltap: the environment says where the model is."""

import json

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

CAPITALS = {"France": "Paris"}
COUNTRY = {"type": "object", "properties": {"country": {"type": "string"}}, "required": ["country"]}
TOOLS: list[ChatCompletionToolParam] = [{"type": "function", "function": {"name": "look_up", "parameters": COUNTRY}}]

client = OpenAI()
messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
while True:
    reply = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS).choices[0].message
    messages.append(reply.to_dict())  # type: ignore[arg-type]
    if not reply.tool_calls:
        break
    for call in reply.tool_calls:
        assert call.type == "function"
        found = CAPITALS[json.loads(call.function.arguments)["country"]]
        messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
print(reply.content)
