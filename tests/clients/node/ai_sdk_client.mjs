// Vercel's AI SDK, by its provider for compatible servers and by that for OpenAI (chats and responses).
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { URL, run } from "./features.mjs";

const compatible = createOpenAICompatible({ name: "raytide", baseURL: URL, includeUsage: true, supportsStructuredOutputs: true });
const openai = createOpenAI({ baseURL: URL, apiKey: "none" });
const providers = { compatible, chat: openai.chat, responses: openai.responses };
const Place = z.object({ city: z.enum(["Oslo", "Rome"]), degrees: z.number().int().min(-40).max(50) });
const City = z.object({ city: z.enum(["Oslo", "Rome"]) });
const weather = tool({ description: "The weather", inputSchema: City, execute: async ({ city }) => `rain in ${city}` });
const TEXT = "tide tide tide t";

async function joined(parts) {
  let text = "";
  for await (const part of parts) text += part;
  return text;
}

const checks = {};
for (const [name, provider] of Object.entries(providers)) {
  const ask = (model, more) => ({ model: provider(model), prompt: "The weather in Oslo?", maxRetries: 0, ...more });
  checks[`${name}: text`] = async () => {
    const answer = await generateText(ask("talker", { maxOutputTokens: 16 }));
    assert.deepEqual([answer.text, answer.usage.outputTokens], [TEXT, 16]);
    assert.equal(await joined(streamText(ask("talker", { maxOutputTokens: 16 })).textStream), TEXT);
  };
  checks[`${name}: objects`] = async () => {
    Place.parse((await generateObject(ask("tiny", { schema: Place, maxOutputTokens: 200 }))).object);
    const stream = streamObject(ask("tiny", { schema: Place, maxOutputTokens: 200 }));
    for await (const _ of stream.partialObjectStream);
    Place.parse(await stream.object);
  };
  checks[`${name}: an agent`] = async () => {
    const agent = ask("agent", { tools: { weather }, stopWhen: stepCountIs(4) });
    assert.equal((await generateText(agent)).text, "The tool says: rain in Oslo.");
    assert.equal(await joined(streamText(agent).textStream), "The tool says: rain in Oslo.");
  };
  checks[`${name}: an object beside tools`] = async () => {
    const tools = { weather: tool({ inputSchema: City }) }; // without a function to run: a call ends the answer
    const answer = await generateText(ask("tiny", { tools, output: Output.object({ schema: Place }), maxOutputTokens: 1600 }));
    if (answer.toolCalls.length === 0) Place.parse(answer.output);
    else City.parse(answer.toolCalls[0].input);
  };
  checks[`${name}: a required tool`] = async () => {
    const answer = await generateText(ask("tiny", { tools: { weather: tool({ inputSchema: City }) }, toolChoice: "required", maxOutputTokens: 1500 }));
    assert(answer.toolCalls.length >= 1);
  };
}
for (const [name, provider] of Object.entries({ compatible, openai })) {
  checks[`${name}: embeddings`] = async () => {
    const answer = await embedMany({ model: provider.textEmbeddingModel("tiny"), values: ["a", "b"], maxRetries: 0 });
    assert.equal(answer.embeddings.length, 2);
  };
}
await run(checks);
