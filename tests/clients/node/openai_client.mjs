// The official client for Node.
import assert from "node:assert/strict";
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { URL, run } from "./features.mjs";

const client = new OpenAI({ baseURL: URL, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "The weather in Oslo?" }];
const parameters = { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const Place = z.object({ city: z.enum(["Oslo", "Rome"]), degrees: z.number().int().min(-40).max(50), wet: z.boolean() });

async function collected(pages) {
  const ids = [];
  for await (const each of pages) ids.push(each.id);
  return ids;
}

await run({
  async models() {
    assert((await collected(client.models.list())).includes("tiny"));
    assert.equal((await client.models.retrieve("tiny")).id, "tiny");
  },
  async chat() {
    const answer = await client.chat.completions.create({ model: "talker", messages, max_completion_tokens: 8 });
    assert.equal(answer.choices[0].message.content, "tide tid");
  },
  async stream() {
    const stream_options = { include_usage: true };
    let text = "", usage;
    for await (const part of await client.chat.completions.create({ model: "talker", messages, max_tokens: 8, stream: true, stream_options })) {
      text += part.choices[0]?.delta?.content ?? "";
      usage = part.usage ?? usage;
    }
    assert.deepEqual([text, usage.completion_tokens], ["tide tid", 8]);
    assert.equal(await client.chat.completions.stream({ model: "talker", messages, max_tokens: 8 }).finalContent(), "tide tid");
  },
  async structured_output() {
    const format = zodResponseFormat(Place, "place");
    const answer = await client.chat.completions.parse({ model: "tiny", messages, response_format: format, max_tokens: 200 });
    Place.parse(answer.choices[0].message.parsed);
  },
  async required_tools() {
    const choice = { tool_choice: "required", parallel_tool_calls: false };
    const answer = await client.chat.completions.create({ model: "tiny", messages, tools, ...choice, max_tokens: 200 });
    assert(["Oslo", "Rome"].includes(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments).city));
  },
  async tools_that_run() {
    const call = ({ city }) => `rain in ${city}`;
    const weather = zodFunction({ name: "weather", description: "The weather", parameters: z.object({ city: z.string() }), function: call });
    for (const stream of [false, true]) {
      const runner = client.chat.completions.runTools({ model: "agent", stream, messages, tools: [weather] });
      assert.equal(await runner.finalContent(), "The tool says: rain in Oslo.");
    }
  },
  async responses() {
    const ask = { model: "talker", input: "hello", max_output_tokens: 8 };
    assert.equal((await client.responses.create(ask)).output_text, "tide tid");
    let text = "";
    const stream = client.responses.stream(ask).on("response.output_text.delta", (event) => (text += event.delta));
    assert.equal((await stream.finalResponse()).output_text, text);
  },
  async embeddings() {
    const answer = await client.embeddings.create({ model: "tiny", input: ["a", "b"] });
    assert(answer.data.length === 2 && answer.data[1].embedding.every(Number.isFinite));
  },
  async files_and_batches() {
    const row = JSON.stringify({ custom_id: "1", method: "POST", url: "/v1/completions", body: { model: "talker", prompt: "x" } });
    const file = await client.files.create({ file: await toFile(Buffer.from(row), "rows.jsonl"), purpose: "batch" });
    let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h" });
    for (let tries = 0; tries < 600 && batch.status !== "completed"; tries++) {
      await new Promise((done) => setTimeout(done, 100));
      batch = await client.batches.retrieve(batch.id);
    }
    assert((await (await client.files.content(batch.output_file_id)).text()).includes("tide"));
    assert((await collected(client.files.list())).includes(file.id));
    assert((await client.files.delete(file.id)).deleted);
  },
  async errors() {
    const unknown = client.chat.completions.create({ model: "none", messages });
    await assert.rejects(unknown, (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
    await assert.rejects(client.chat.completions.create({ model: "tiny", messages, temperature: 9 }), (error) => error.param === "temperature");
  },
  async a_client_that_leaves() {
    const stream = await client.chat.completions.create({ model: "talker", messages, max_tokens: 2000, stream: true });
    for await (const _ of stream) break;
    await client.chat.completions.create({ model: "talker", messages, max_tokens: 1 });
  },
});
