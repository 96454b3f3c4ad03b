// llama.cpp's side of llama_cpp.py, by the prebuilt node-llama-cpp:
//     node llama_cpp.mjs FOLDER MODEL.gguf THREADS NEW_TOKENS
// FOLDER has node_modules. Each line on stdin is a JSON list of prompts of token ids, which run together; each line on
// stdout says how long that took. The first line names the instruction sets.
import {createInterface} from "node:readline";
import {createRequire} from "node:module";
import {pathToFileURL} from "node:url";

const [folder, modelPath, threads, newTokens] = process.argv.slice(2);
const {getLlama} = await import(pathToFileURL(createRequire(`${folder}/`).resolve("node-llama-cpp")));
const llama = await getLlama({gpu: false, build: "never", skipDownload: true, maxThreads: Number(threads)});
const model = await llama.loadModel({modelPath});
console.log(JSON.stringify({instructions: llama.systemInfo.trim()}));

async function answer(sequence, prompt) {
    let tokens = prompt, count = 0, firstAt = 0;
    while (count < Number(newTokens)) {  // an end token ends the evaluation, and not the measurement
        for await (const token of sequence.evaluate(tokens, {temperature: 0, yieldEogToken: true})) {
            firstAt ||= performance.now();
            tokens = [token];
            if (++count >= Number(newTokens)) break;
        }
    }
    return firstAt;
}

for await (const line of createInterface({input: process.stdin})) {
    const prompts = JSON.parse(line);
    const length = Math.max(...prompts.map((prompt) => prompt.length)) + Number(newTokens) + 8;
    const context = await model.createContext(
        {sequences: prompts.length, contextSize: length, batchSize: 512, threads: Number(threads)}
    );
    const sequences = prompts.map(() => context.getSequence());
    const began = performance.now();
    const firsts = await Promise.all(sequences.map((sequence, index) => answer(sequence, prompts[index])));
    const seconds = (performance.now() - began) / 1e3;
    console.log(JSON.stringify({seconds, first_s: (Math.max(...firsts) - began) / 1e3}));
    await context.dispose();
}
process.exit(0);
