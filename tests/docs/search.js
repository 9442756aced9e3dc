// node search.js SITE QUESTIONS (a JSON list): prints as JSON, per question, the places that the site's own search names, best first.
// It runs what a browser runs: the site's query.js, and the theme's worker with the site's index.
const { readFileSync, readdirSync } = require("fs");
const { runInThisContext } = require("vm");

const [site, questions] = process.argv.slice(2);
const scripts = `${site}/assets/javascripts/workers`;
let receive;
let answered;

globalThis.self = globalThis;
globalThis.addEventListener = (_, listener) => (receive = listener);
globalThis.postMessage = (message) => answered(message.data);
globalThis.Worker = class {
  postMessage(data) {
    receive({ data });
  }
};
const run = (path) => runInThisContext(readFileSync(path, "utf8"), path);
run(`${site}/query.js`);
run(`${scripts}/${readdirSync(scripts).find((name) => name.endsWith(".js"))}`);

const worker = new Worker();
const ask = (type, data) => new Promise((resolve) => ((answered = resolve), worker.postMessage({ type, data })));

(async () => {
  const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
  await ask(0, { ...index, options: { suggest: true } });
  const found = [];
  for (const question of JSON.parse(questions))
    found.push((await ask(2, question)).items.map(([{ location }]) => location));
  console.log(JSON.stringify(found));
})();
