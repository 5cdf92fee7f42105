// A chat of three turns with thinking on. It sends back only the visible answers; the server finds
// the conversation's bank all the same and prefills only what is new.
//
//     npm ci && node chat.js 127.0.0.1:50051

import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const target = process.argv[2] ?? "127.0.0.1:50051";
const protos = fileURLToPath(new URL("../../protos", import.meta.url));
const definition = loader.loadSync("ds4grpc/v1/generation.proto", {
  includeDirs: [protos],
  keepCase: true,
  enums: String,
  longs: Number,
  defaults: true,
  oneofs: true,
});
const { ds4grpc } = grpc.loadPackageDefinition(definition);
const client = new ds4grpc.v1.GenerationService(target, grpc.credentials.createInsecure());

const SYSTEM = `You are a patient guide to rivers. ${"Answer briefly and kindly. ".repeat(40)}`;
const QUESTIONS = [
  "Name one long river.",
  "Which sea does it reach?",
  "How would you travel along it?",
];

// Streams one reply, printing both channels, and resolves to its visible text.
function reply(messages) {
  const request = {
    chat: { messages, thinking: { mode: "THINKING_MODE_ENABLED" } },
    sampling: { temperature: 0 },
    stopping: { max_tokens: 64 },
  };
  const deadline = Date.now() + 120_000;
  return new Promise((resolve, reject) => {
    let text = "";
    let channel = "";
    const call = client.generate(request, { deadline });
    call.on("data", ({ started, delta, finished }) => {
      if (started) {
        const { admission, cached_tokens, prompt_tokens } = started;
        console.log(`[${admission}: ${cached_tokens} of ${prompt_tokens} prompt tokens cached]`);
      } else if (delta) {
        if (delta.channel !== channel) process.stdout.write(`\n${delta.channel}: `);
        channel = delta.channel;
        process.stdout.write(delta.text);
        if (channel === "CHANNEL_TEXT") text += delta.text;
      } else if (finished) {
        const { generated_tokens, reasoning_tokens } = finished.usage;
        console.log(`\n[${generated_tokens} tokens, ${reasoning_tokens} of them reasoning]`);
      }
    });
    call.on("error", reject);
    call.on("end", () => resolve(text));
  });
}

const messages = [{ role: "ROLE_SYSTEM", content: SYSTEM }];
try {
  for (const question of QUESTIONS) {
    console.log(`\n> ${question}`);
    messages.push({ role: "ROLE_USER", content: question });
    messages.push({ role: "ROLE_ASSISTANT", content: await reply(messages) });
  }
} catch (error) {
  console.error(`${grpc.status[error.code] ?? "error"}: ${error.details ?? error.message}`);
  process.exitCode = 1;
} finally {
  client.close();
}
