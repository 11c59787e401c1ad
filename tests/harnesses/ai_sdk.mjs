// One conversation through the Vercel AI SDK, streamed; prints its steps as JSON.
// Environment: MODULES (the folder with node_modules), DIALECT, BASE_URL, KEY, MODEL.
import { createRequire } from "node:module";

const { DIALECT, BASE_URL, KEY, MODEL, MODULES } = process.env;
const require = createRequire(`${MODULES}/`);
const { jsonSchema, isStepCount, streamText, tool } = require("ai");

globalThis.AI_SDK_LOG_WARNINGS = false;

const openai = () => require("@ai-sdk/openai").createOpenAI({ baseURL: `${BASE_URL}/v1`, apiKey: KEY });
const models = {
  openai_chat: () => openai().chat(MODEL),
  openai_responses: () => openai().responses(MODEL),
  anthropic: () => require("@ai-sdk/anthropic").createAnthropic({ baseURL: `${BASE_URL}/v1`, apiKey: KEY })(MODEL),
  gemini: () => require("@ai-sdk/google").createGoogle({ baseURL: `${BASE_URL}/v1beta`, apiKey: KEY })(MODEL),
};

const look = tool({
  description: "Looks at a place.",
  inputSchema: jsonSchema({ type: "object", properties: { place: { type: "string" } }, required: ["place"] }),
  execute: async ({ place }) => ({ shed: "tools", pond: "water", roof: "a frog" })[place],
});

const messages = [];
const steps = [];
for (const content of ["Where is the frog?", "Thank you."]) {
  messages.push({ role: "user", content });
  const stream = streamText({
    model: models[DIALECT](),
    messages,
    tools: { look },
    stopWhen: isStepCount(5),
    maxRetries: 0,
    onError: ({ error }) => {
      throw error;
    },
  });
  for await (const part of stream.fullStream) if (part.type === "error") throw part.error;
  messages.push(...(await stream.responseMessages));
  for (const step of await stream.steps) {
    const { inputTokens, outputTokens, inputTokenDetails } = step.usage;
    steps.push({
      text: step.text,
      places: step.toolCalls.map((call) => call.input.place),
      finish: step.finishReason,
      usage: [inputTokens, outputTokens, inputTokenDetails.cacheReadTokens],
    });
  }
}
console.log(JSON.stringify(steps));
