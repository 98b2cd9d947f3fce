// Calls a server by OpenAI's Node client, and writes what it got as JSON.
// Its package comes from the folder in OPENAI_NODE_FOLDER: npm install --prefix FOLDER openai
import { createRequire } from "node:module";

const { default: OpenAI } = createRequire(process.env.OPENAI_NODE_FOLDER + "/")("openai");
const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "any", maxRetries: 0 });
const asked = { model: "llama", temperature: 0, max_tokens: 12 };
const messages = [{ role: "user", content: "two and two" }];

const names = [];
for await (const one of client.models.list()) names.push(one.id);
const completion = await client.completions.create({ ...asked, prompt: "once upon a time" });
const chat = await client.chat.completions.create({ ...asked, messages });
let streamed = "";
let usage;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const one of await client.chat.completions.create({ ...asked, messages, ...options })) {
  streamed += one.choices[0]?.delta.content ?? "";
  usage = one.usage ?? usage;
}
const vectors = await client.embeddings.create({ model: "bert", input: ["two", "a cat"] });
let error;
try {
  await client.completions.create({ ...asked, model: "nothing", prompt: "once" });
} catch (caught) {
  error = [caught.constructor.name, caught.status, caught.code];
}
console.log(
  JSON.stringify({
    names,
    completion: completion.choices[0].text,
    chat: chat.choices[0].message.content,
    streamed,
    usage,
    vectors: vectors.data.map((one) => one.embedding),
    error,
  }),
);
