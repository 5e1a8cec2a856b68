"use strict";
/* The live page: it reads the events of /stages/live, and draws the newest one. Nothing of it is kept anywhere. */

const root = new URL("./", location.href);
const CARDS = ["parse", "preprocess", "batch", "postprocess"];
const LANES = { text: "texts", image: "images", plugin: "requests" };
const REASONS = {
  delay: "wait too long", requests: "too many requests", items: "too many items", tokens: "too many tokens",
  bytes: "too many bytes", part: "tenant's share", deadline: "too late for them",
};
const SAMPLES = [
  "How do I reset my password?", "Where is my parcel?", "The invoice shows the wrong amount",
  "I cannot log in to my account", "Cancel my subscription", "Opening hours of the shop in town",
  "A recipe for bread without yeast", "The train to Basel is late",
];
const MINUTE_S = 60, SPEAK_EVERY_S = 10, RETRY_S = 1;

const byId = id => document.getElementById(id);

/* ---- Elements and numbers ---- */

function make(tag, text = "", ...inside) {
  const [name, ...classes] = tag.split("."), element = document.createElement(name);
  element.className = classes.join(" ");
  if (text) element.textContent = text;
  element.append(...inside);
  return element;
}
function put(element, text) { if (element.textContent !== text) element.textContent = text; }
function set(element, name, value) { if (element.style.getPropertyValue(name) !== value) element.style.setProperty(name, value); }
function withSmall(element, number, small) { element.replaceChildren(number, make("small", ` ${small}`)); }

const clamp = (value, low, high) => Math.min(high, Math.max(low, value));
const logPart = (value, low, high) => clamp(Math.log(Math.max(value, low) / low) / Math.log(high / low), 0, 1);
const whole = value => Math.round(value).toLocaleString("en");
const share = part => `${Math.round(100 * part)} %`;
const count = value => value >= 1e6 ? `${(value / 1e6).toPrecision(2)} M` : value >= 1e4 ? `${Math.round(value / 1e3)}k`
  : value >= 1e3 ? `${(value / 1e3).toFixed(1)}k` : value >= 10 || value % 1 === 0 ? String(Math.round(value)) : value.toFixed(1);
const span = seconds => seconds < 1e-3 ? `${Math.round(seconds * 1e6)} µs` : seconds < 1
  ? `${Number((seconds * 1e3).toPrecision(2))} ms` : `${Number(seconds.toPrecision(2))} s`;

/* ---- The state of the page ---- */

const minutes = new Map();    /* the events of the last minute, by model */
let newest = null, paused = false, spokenAt = 0, cards = [], abilities = {};

const chosen = () => byId("model").value;

/* ---- The flow: built once for a model, then changed in place ---- */

const parts = { pipes: {} };
let builtFor = "";

function buildFlow(view) {
  const lanes = [...new Set(view.stages.filter(stage => stage.card === "batch").map(stage => stage.name))];
  const shape = JSON.stringify([chosen(), view.stages.map(stage => [stage.name, stage.workers])]);
  if (shape === builtFor) return;
  builtFor = shape;
  const flow = byId("flow");
  flow.replaceChildren();
  buildDoor(flow);
  for (const name of CARDS) {
    const stages = view.stages.filter(stage => stage.card === name);
    flow.append(name === "batch" ? buildDevice(lanes) : buildStage(name, stages));
    flow.append(buildPipe(name));
  }
}

function buildPipe(name) {
  const pipe = make("div.pipe.none", "", make("b"), make("div.flowing"));
  parts.pipes[name] = pipe;
  return pipe;
}

function buildDoor(flow) {
  const gauge = make("div.gauge"), meters = {};
  for (const name of ["wait", "requests", "tokens"]) {
    meters[name] = make("div.meter", "", make("span", name), make("b"), make("div.track", "", make("span")));
    gauge.append(meters[name]);
  }
  const head = make("h3", "door", make("span")), out = make("div.out", "", make("span", "rejected"), make("span"));
  parts.door = { head: head.lastChild, meters, out };
  flow.append(make("div.card.stage.door", "", head, gauge, out, make("p.facts", "bars: 0.1 to 100 %, log")), buildPipe("door"));
}

function buildTank() {
  const tank = make("div.tank", "", make("div.fill.empty"));
  for (const time of ["10 ms", "100 ms", "1 s"]) {
    const mark = make("i");
    mark.dataset.time = time;
    tank.append(mark);
  }
  tank.append(make("div.count", "", make("b", "0"), make("small", "waiting")));
  return tank;
}

function buildStage(name, stages) {
  const head = make("h3", name, make("span")), tank = buildTank(), slots = make("div.slots"), facts = make("p.facts");
  const workers = stages.reduce((sum, stage) => sum + stage.workers, 0);
  if (workers > 16) slots.append(make("div.track", "", make("span")));
  else for (let worker = 0; worker < workers; worker++) slots.append(make("u"));
  slots.append(make("small"));
  const card = make("div.card.stage", "", head, tank, slots, facts);
  parts[name] = { card, head: head.lastChild, tank, slots, facts, tag: make("span.tag", "bottleneck") };
  return card;
}

function buildDevice(lanes) {
  const head = make("h3", "batch · device", make("span")), tank = buildTank(), facts = make("p.facts"), box = make("div.lanes");
  const drawn = {};
  for (const stage of lanes) {
    const lane = stage.endsWith("_images") ? "image" : "text";
    const canvas = make("canvas"), busy = make("span");
    canvas.setAttribute("role", "img");
    drawn[lane] = { canvas, busy, width: 150, height: 36 };
    sized.observe(canvas);
    box.append(make("div", "", make("small", "", make("b", LANES[lane]), busy), canvas));
  }
  const ago = make("span", "1 s ago");
  box.append(make("small", "", ago, make("span", "now")));
  const card = make("div.card.stage.device", "", head, tank, box, facts);
  parts.batch = { card, head: head.lastChild, tank, facts, lanes: drawn, ago, tag: make("span.tag", "bottleneck") };
  return card;
}

const sized = new ResizeObserver(entries => {
  for (const { target, contentRect } of entries)
    for (const lane of Object.values(parts.batch?.lanes ?? {}))
      if (lane.canvas === target) [lane.width, lane.height] = [contentRect.width, contentRect.height];
});

/* ---- Showing one event ---- */

/* The lanes of texts and images share a card: their workers add up, and the longer wait shows. */
function joined(stages) {
  const sum = key => stages.reduce((total, stage) => total + stage[key], 0), workers = sum("workers");
  const mean = key => stages.reduce((total, stage) => total + stage[key] * stage.workers, 0) / Math.max(1, workers);
  const busiest = stages.reduce((one, other) => other.busy > one.busy ? other : one);
  return {
    waiting: sum("waiting"), workers, busy: busiest.busy, busyWorkers: mean("busy") * workers,
    blocked: Math.max(...stages.map(stage => stage.blocked)), blockedWorkers: mean("blocked") * workers,
    rate: sum("rate"), wait_s: Math.max(...stages.map(stage => stage.wait_s)), work_s: busiest.work_s,
  };
}

function showStage(name, stage, isHot, more = []) {
  const part = parts[name], isHeld = !isHot && stage.blocked > .3;
  part.card.classList.toggle("hot", isHot);
  part.card.classList.toggle("held", isHeld);
  if (isHot && !part.tag.isConnected) part.card.append(part.tag);
  if (!isHot) part.tag.remove();
  put(part.head, isHeld ? "held" : share(stage.busy));
  part.tank.firstChild.classList.toggle("empty", !stage.waiting);
  set(part.tank.firstChild, "--height", `${(100 * logPart(stage.wait_s, .001, 10)).toFixed(1)}%`);
  put(part.tank.lastChild.firstChild, count(stage.waiting));
  if (part.slots) showSlots(part.slots, stage);
  const facts = [["wait", stage.rate ? span(stage.wait_s) : "–"], ["work", stage.rate ? span(stage.work_s) : "–"], ...more];
  if (stage.blocked > .05) facts.push(["blocked", share(stage.blocked)]);
  part.facts.replaceChildren(...facts.map(([fact, value]) => make("span", `${fact} `, make("b", value))));
}

function showSlots(slots, stage) {
  const blocked = Math.round(stage.blockedWorkers), on = Math.min(stage.workers - blocked, Math.round(stage.busyWorkers + .2));
  if (slots.firstChild.className === "track") set(slots.firstChild.firstChild, "--part", `${100 * on / stage.workers}%`);
  slots.querySelectorAll("u").forEach((slot, place) => { slot.className = place < on ? "on" : place < on + blocked ? "blocked" : ""; });
  put(slots.lastChild, blocked ? `${blocked} blocked` : `${on} of ${stage.workers}`);
}

function showPipe(name, rate, unit) {
  const pipe = parts.pipes[name], flows = rate > .05, thick = flows ? 3 + 45 * logPart(rate, 1, 1e4) : 2;
  pipe.classList.toggle("none", !flows);
  set(pipe, "--thick", `${thick.toFixed(1)}px`);
  set(pipe, "--scale", (thick / 48).toFixed(2));
  set(pipe, "--step", `${(2.4 - 2 * logPart(rate + .1, 1, 1e4)).toFixed(1)}s`);
  withSmall(pipe.firstChild, flows ? count(rate) : "0", unit);
}

function showDoor(door) {
  const { head, meters, out } = parts.door;
  put(head, `${count(door.offered)} req/s`);
  const shown = {
    wait: [door.delay_s, door.target_delay_s, span], requests: [door.requests, door.max_requests, count],
    tokens: [door.tokens, door.max_tokens, count],
  };
  for (const [name, [value, limit, text]] of Object.entries(shown)) {
    const meter = meters[name], part = value / limit;
    meter.classList.toggle("near", part > .9);
    put(meter.children[1], `${text(value)} of ${text(limit)}`);
    set(meter.lastChild, "--part", `${(100 * logPart(part, .001, 1)).toFixed(1)}%`);
    meter.title = `${(100 * part).toFixed(1)} % of the limit`;
  }
  out.classList.toggle("on", door.rejected > .5);
  put(out.lastChild, door.rejected > .05 ? `${count(door.rejected)}/s` : "none");
}

function showVerdict(verdict, now) {
  const box = byId("verdict"), sentence = byId("sentence");
  box.className = `verdict ${verdict.kind}`;
  if (sentence.textContent !== verdict.lead + verdict.rest) sentence.replaceChildren(make("em", verdict.lead), verdict.rest);
  put(byId("why"), verdict.why);
  const help = byId("help"), shown = JSON.stringify(verdict.help);
  help.hidden = !verdict.help;
  if (verdict.help && help.dataset.shown !== shown) {
    help.dataset.shown = shown;
    const { text, setting } = verdict.help;
    help.replaceChildren(make("b", "What would help"), setting ? `${text}: ` : text, make("code", setting));
  }
  const name = { batch: "device", door: "overload" }[verdict.at] ?? verdict.at;
  document.title = `${verdict.kind === "calm" || verdict.kind === "off" ? "" : "▲ "}${name || verdict.lead.toLowerCase()} · staged-pool`;
  const told = verdict.lead + verdict.rest.replace(/\d+/g, number => Math.round(number / 10) * 10);
  if (told !== byId("spoken").dataset.told && now - spokenAt > SPEAK_EVERY_S) {
    byId("spoken").dataset.told = told;
    put(byId("spoken"), `${verdict.lead}${verdict.rest} ${verdict.why}`);
    spokenAt = now;
  }
}

/* ---- Charts ---- */

const SVG = "http://www.w3.org/2000/svg";

function plot(id, lines, marks, part, label) {
  const box = byId(id);
  if (!box.firstChild) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.setAttribute("aria-hidden", "true");
    for (const kind of ["grid", "grid", "grid", "first", "second"]) {
      const path = document.createElementNS(SVG, "path");
      path.setAttribute("class", kind);
      svg.append(path);
    }
    box.append(svg, make("span"), make("span"), make("span"));
  }
  const paths = box.firstChild.children, labels = box.querySelectorAll("span"), y = value => 100 - 100 * part(value);
  for (let place = 0; place < 3; place++) {
    const mark = marks[place];
    paths[place].setAttribute("d", mark ? `M0 ${y(mark[0])}H100` : "");
    put(labels[place], mark?.[1] ?? "");
    set(labels[place], "top", `${mark ? y(mark[0]) : 0}%`);
  }
  for (let place = 0; place < 2; place++) {
    const points = (lines[place] ?? []).filter(([, value]) => value !== null);
    paths[3 + place].setAttribute("d", points.map(([ago, value], index) =>
      `${index ? "L" : "M"}${(100 - 100 * ago / MINUTE_S).toFixed(2)} ${y(value).toFixed(2)}`).join(""));
  }
  box.setAttribute("aria-label", label);
}

function showCharts(past, now) {
  const view = past.at(-1).view, rate = joined(view.stages.filter(stage => stage.card === "postprocess")).rate;
  const rates = past.map(each => [now - each.at, joined(each.view.stages.filter(stage => stage.card === "postprocess")).rate]);
  const top = Math.max(1, ...rates.map(([, value]) => value)) * 1.1, step = 10 ** Math.ceil(Math.log10(top));
  const high = [.1, .2, .5, 1].map(part => part * step).find(value => value >= top);
  withSmall(byId("rate"), count(rate), `items/s · ${count(view.tokens)} tokens/s`);
  plot("rate-plot", [rates], [[high, count(high)], [high / 2, count(high / 2)]], value => value / high,
    `Throughput of the last minute: now ${count(rate)} items a second, at most ${count(top / 1.1)}`);

  const latency = key => past.map(each => [now - each.at, each.view[key]]);
  if (view.p50_s === null) withSmall(byId("latency"), "–", "no answers");
  else withSmall(byId("latency"), span(view.p50_s), `p50 · ${span(view.p99_s)} p99`);
  plot("latency-plot", [latency("p50_s"), latency("p99_s")], [[10, "10 s"], [.1, "100 ms"], [.001, "1 ms"]],
    value => logPart(value, .001, 10),
    view.p50_s === null ? "Latency: no answers" : `Latency: half below ${span(view.p50_s)}, one in a hundred above ${span(view.p99_s)}`);

  showSizes(past, now);
  showRejections(past);
}

function showSizes(past, now) {
  const bins = ["1", "2", "4", "8", "16", "32", "64", "128+"], found = Object.fromEntries(bins.map(bin => [bin, 0]));
  let batches = 0, items = 0, fill = 0, last = Infinity;
  /* Each event has the batches of its window of 2 s, so events that far apart count each batch once. */
  for (const each of [...past].reverse()) {
    if (now - each.at > 10 || last - each.at < 2) continue;
    last = each.at;
    for (const [bound, number] of Object.entries(each.view.sizes)) found[Number(bound) <= 64 ? bound : "128+"] += number;
  }
  for (const batch of past.at(-1).view.batches) { batches++; items += batch.items; fill += batch.fill; }
  const most = Math.max(1, ...Object.values(found)), bars = byId("batch-bars");
  if (!bars.children.length) for (const bin of bins) { bars.append(make("div")); byId("batch-axis").append(make("span", bin)); }
  bins.forEach((bin, place) => set(bars.children[place], "--height", `${100 * found[bin] / most}%`));
  const none = !Object.values(found).some(Boolean);
  withSmall(byId("batch"), none ? "–" : whole(items / Math.max(1, batches)), none ? "no batches" : `items · ${share(fill / batches)} of the budget`);
  bars.setAttribute("aria-label", none ? "Batch sizes: no batches" : `Batch sizes: ${bins.map(bin => `up to ${bin} items ${found[bin]} times`).join(", ")}`);
}

function showRejections(past) {
  const first = past[0].view.door, door = past.at(-1).view.door, box = byId("reasons");
  const fresh = reason => (door.reasons[reason] ?? 0) - (first.reasons[reason] ?? 0);
  const seen = Object.keys(REASONS).filter(reason => fresh(reason) > 0), total = seen.reduce((sum, reason) => sum + fresh(reason), 0);
  const shown = [...new Set([...seen, "delay", "requests", "part"])].slice(0, 4);
  withSmall(byId("rejected"), whole(total), total ? `of ${whole(door.offered_total - first.offered_total)}, with Retry-After` : "requests");
  box.replaceChildren(...shown.flatMap(reason => {
    const track = make("div.track", "", make("span"));
    set(track.firstChild, "--part", `${total ? 100 * fresh(reason) / total : 0}%`);
    return [make("span", REASONS[reason]), track, make(fresh(reason) ? "b" : "b.zero", whole(fresh(reason)))];
  }));
}

/* ---- The device's lanes: a batch is as wide as its time, and as high as it is full ---- */

let colours = {};

function readColours() {
  const style = getComputedStyle(document.documentElement);
  colours = Object.fromEntries(["--hot", "--flow", "--line"].map(name => [name, style.getPropertyValue(name)]));
}

function drawLane(lane, part, event, clock) {
  const { canvas, width, height } = part, batches = event.view.batches.filter(batch => (batch.lane === "image") === (lane === "image"));
  const ratio = devicePixelRatio;
  if (canvas.width !== Math.round(width * ratio)) [canvas.width, canvas.height] = [Math.round(width * ratio), Math.round(height * ratio)];
  const typical = batches.length ? batches.reduce((sum, batch) => sum + batch.seconds, 0) / batches.length : .05;
  const stage = event.view.stages.find(each => each.card === "batch" && each.name.endsWith("_images") === (lane === "image"));
  const long_s = [.2, .5, 1, 2, 4].find(seconds => seconds >= 18 * typical / Math.max(.25, stage.busy)) ?? 4;
  const paint = canvas.getContext("2d"), isHot = parts.batch.card.classList.contains("hot");
  paint.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint.clearRect(0, 0, width, height);
  paint.fillStyle = colours["--line"];
  for (const quarter of [1, 2, 3]) paint.fillRect(Math.round(width * quarter / 4), 0, 1, height);
  paint.fillStyle = colours[isHot ? "--hot" : "--flow"];
  for (const batch of batches) {
    const from = width * (1 - (clock - (event.at - batch.age_s)) / long_s), wide = width * batch.seconds / long_s;
    const high = (height - 8) * Math.sqrt(Math.min(1, batch.fill));
    if (from < width && from + wide > 0) paint.fillRect(from + .5, height - 4 - high, Math.max(1.5, wide - 1.5), high);
  }
  put(parts.batch.ago, `${span(long_s)} ago`);
  put(part.busy, stage.rate || stage.waiting ? `${share(stage.busy)} busy` : "none");
  canvas.setAttribute("aria-label", `Batches of ${LANES[lane]}: ${part.busy.textContent}`);
}

/* ---- One event ---- */

function see(event) {
  const names = Object.keys(event.models), select = byId("model");
  if (names.join() !== [...select.options].map(option => option.value).join()) {
    const before = select.value;
    select.replaceChildren(...names.map(name => { const option = make("option", name); option.value = name; return option; }));
    if (names.includes(before)) select.value = before;
    learnAbilities();
  }
  document.body.classList.remove("lost-contact");
  showState(event.state || "serving", event.state);
  for (const name of names) {
    const past = minutes.get(name) ?? [];
    if (past.length && event.at - past.at(-1).at > 5) past.length = 0;
    past.push({ at: event.at, ...event.models[name] });
    while (event.at - past[0].at > MINUTE_S) past.shift();
    minutes.set(name, past);
  }
  newest = event;
  if (names.length) show(event);
  else showVerdict({ kind: "off", at: "", lead: "Loading", rest: ".", why: event.state }, event.at);
}

function show(event) {
  const past = minutes.get(chosen()), { view, verdict } = past.at(-1);
  buildFlow(view);
  readColours();
  showVerdict(verdict, event.at);
  showDoor(view.door);
  showPipe("door", view.door.admitted, "req/s");
  for (const name of CARDS) {
    const stage = joined(view.stages.filter(each => each.card === name));
    const more = name === "batch" ? [["tokens/s", count(view.tokens)], ["padding", share(view.padding)], ["cut full", share(view.full)]] : [];
    showStage(name, stage, verdict.kind !== "calm" && verdict.at === name, more);
    showPipe(name, name === "postprocess" ? view.answers : stage.rate, name === "postprocess" ? "ans/s" : name === "parse" ? "req/s" : "items/s");
  }
  showCharts(past, event.at);
  drawLanes();
  if (byId("numbers").open) showTable(view);
}

function drawLanes() {
  const past = minutes.get(chosen());
  if (!past || !parts.batch) return;
  /* One event late: so the newest batches are known before they come into sight. */
  const clock = paused ? newest.at : newest.at - newest.period_s + Math.min(newest.period_s, (performance.now() - arrivedAt) / 1e3);
  for (const [lane, part] of Object.entries(parts.batch.lanes)) drawLane(lane, part, past.at(-1), clock);
}

function showTable(view) {
  const head = ["stage", "busy", "blocked", "waiting", "wait", "work", "rate", "oldest", "ended", "crashes"];
  const rows = view.stages.map(stage => [stage.name, share(stage.busy), share(stage.blocked), whole(stage.waiting), span(stage.wait_s),
    span(stage.work_s), `${count(stage.rate)}/s`, span(stage.oldest_s), whole(stage.dropped), whole(stage.crashes)]);
  const limits = Object.entries(view.limiters).map(([name, limit]) => [name, `${limit.used} of ${limit.slots}`, whole(limit.waiting)]);
  const table = (names, lines) => make("table", "", make("thead", "", make("tr", "", ...names.map(name => make("th", name)))),
    make("tbody", "", ...lines.map(line => make("tr", "", ...line.map(cell => make("td", cell))))));
  byId("table").replaceChildren(table(head, rows), table(["limit", "used", "waiting"], limits));
}

function showState(text, isBad) {
  put(byId("state"), text);
  byId("state").className = isBad ? "state bad" : "state";
}

/* ---- The stream: EventSource cannot send a key, so the page reads it itself ---- */

const keyField = document.querySelector("#key input");
const withKey = () => keyField.value ? { authorization: `Bearer ${keyField.value}` } : {};
let stream = null, arrivedAt = 0;

async function follow() {
  stream?.abort();
  if (document.visibilityState === "hidden") return;
  const own = stream = new AbortController();
  try {
    const answer = await fetch(new URL("stages/live", root), { headers: withKey(), cache: "no-store", signal: own.signal });
    byId("key").hidden = answer.status !== 401 && !keyField.value;
    if (answer.status === 401) {
      lostContact(keyField.value ? "The API key is not known here." : "The server asks for an API key.", "");
      return;
    }
    if (!answer.ok) throw new Error((await answer.json()).error.message);
    const lines = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let rest = ""; ;) {
      const { value, done } = await lines.read();
      if (done) break;
      rest += value;
      const events = rest.split("\n\n");
      rest = events.pop();
      const data = events.filter(event => event.startsWith("data: ")).at(-1);
      if (data && !paused) {
        arrivedAt = performance.now();
        see(JSON.parse(data.slice(6)));
      }
    }
    lostContact("No answer.", "Trying again.");
  } catch (error) {
    if (own.signal.aborted) return;
    lostContact("No answer.", error instanceof TypeError ? "Trying again." : error.message);
  }
  setTimeout(() => { if (stream === own) follow(); }, RETRY_S * 1e3);
}

function lostContact(lead, why) {
  document.body.classList.add("lost-contact");
  showState("not connected", true);
  byId("verdict").className = "verdict off";
  byId("help").hidden = true;
  byId("sentence").replaceChildren(make("em", lead));
  put(byId("why"), why);
  document.title = "no answer · staged-pool";
}

/* ---- Try it ---- */

async function learnAbilities() {
  try {
    const answer = await fetch(new URL("ready", root), { cache: "no-store" });
    cards = (await answer.json()).models ?? [];
  } catch { cards = []; }
  offerTry();
}

function offerTry() {
  const card = cards.find(each => each.name === chosen()) ?? {};
  abilities = {
    images: (card.lanes ?? []).includes("image"),
    kind: card.scoring === "cross-encoder" ? "rank" : (card.outputs ?? []).includes("dense") ? "embed"
      : (card.outputs ?? []).includes("labels") ? "classify" : card.is_plugin ? "" : "pool",
  };
  put(byId("send"), { rank: "Rank", embed: "Embed", classify: "Classify", pool: "Compute" }[abilities.kind] ?? "Send");
  byId("choose").hidden = !abilities.images || abilities.kind === "rank";
  put(byId("hint"), `${byId("choose").hidden ? "A text" : "A text, or drop an image here"}; Ctrl+Enter sends.`);
  byId("send").disabled = byId("curl").disabled = !abilities.kind || !card.name;
}

/* The request for an input: a text, or an object with an image. */
function requestFor(input) {
  const model = chosen();
  if (abilities.kind === "rank") return ["rerank", { model, query: input, documents: SAMPLES }];
  if (abilities.kind === "classify") return ["classify", { model, input: [input] }];
  if (abilities.kind === "embed") return ["v1/embeddings", { model, input: canCompare() ? [input, ...SAMPLES] : [input] }];
  const card = cards.find(each => each.name === model);
  const task = card.outputs.includes("sparse") ? "sparse" : card.outputs.includes("multi_vector") ? "token_embed" : "token_classify";
  return ["pooling", { model, task, input: [input] }];
}
const canCompare = () => (cards.find(each => each.name === chosen())?.lanes ?? []).includes("text");

async function tryIt(input, picture = "") {
  const [path, body] = requestFor(input), began = performance.now(), box = byId("answer");
  byId("send").disabled = true;
  try {
    const answer = await fetch(new URL(path, root), {
      method: "POST", headers: { "content-type": "application/json", ...withKey() }, body: JSON.stringify(body),
    });
    const said = await answer.json(), seconds = (performance.now() - began) / 1e3;
    if (!answer.ok) box.replaceChildren(make("p.failed", said.error?.message ?? `status ${answer.status}`));
    else box.replaceChildren(...result(said, body, picture), ...timing(answer.headers.get("server-timing") ?? "", seconds));
  } catch (error) {
    box.replaceChildren(make("p.failed", `No answer: ${error.message}`));
  }
  byId("send").disabled = false;
}

function result(said, body, picture) {
  const head = (title, note) => make("h3", title, make("span.soft.small", note));
  const of = picture ? `of ${picture}, ` : "", tokens = said.usage?.prompt_tokens ? `, ${said.usage.prompt_tokens} tokens` : "";
  if (abilities.kind === "rank")
    return [head("Best answers of eight", "score"), bars(said.results.map(each => [SAMPLES[each.index], each.relevance_score]))];
  if (abilities.kind === "classify") {
    const [first] = said.data, labels = cards.find(each => each.name === chosen()).labels;
    return [head(`${of}${first.label ?? "Labels"}`, "probability"), bars(first.probs.map((value, place) => [labels[place] ?? String(place), value]))];
  }
  if (abilities.kind === "embed") {
    const [own, ...others] = said.data.map(each => each.embedding);
    if (!others.length) return [head("Vector", `${of}${own.length} numbers${tokens}`), make("p.small.soft", `${own.slice(0, 8).map(each => each.toFixed(4)).join(", ")}, …`)];
    return [head("Nearest of eight", `${of}${own.length} numbers${tokens}`), bars(others.map((other, place) => [SAMPLES[place], cosine(own, other)]))];
  }
  return [head("Answer", tokens.slice(2)), make("p.small.soft", `${JSON.stringify(said.data[0].data ?? said.data[0]).slice(0, 400)}…`)];
}

function cosine(one, other) {
  let dot = 0, left = 0, right = 0;
  for (let place = 0; place < one.length; place++) {
    dot += one[place] * other[place];
    left += one[place] ** 2;
    right += other[place] ** 2;
  }
  return dot / Math.sqrt(left * right);
}

function bars(rows) {
  const list = make("div.near");
  for (const [text, value] of rows.sort((one, other) => other[1] - one[1]).slice(0, 5)) {
    const track = make("div.track", "", make("span"));
    set(track.firstChild, "--part", `${clamp(100 * value, 0, 100)}%`);
    list.append(make("p", text), track, make("b", value.toFixed(2)));
  }
  return list;
}

function timing(header, seconds) {
  const steps = [...header.matchAll(/(\w+);dur=([\d.e+-]+)/g)].map(([, name, ms]) => [name, ms / 1e3]);
  if (!steps.length) return [];
  const known = steps.reduce((sum, [, step_s]) => sum + step_s, 0), bar = make("div.time"), legend = make("p.facts");
  for (const [name, step_s] of [...steps, ["network and HTTP", Math.max(0, seconds - known)]]) {
    const text = name === "queue" ? "wait for the device" : name, part = step_s / Math.max(seconds, known);
    const piece = make(name === "queue" || name === "fetch" ? "div.wait" : "div", part > .14 ? `${text} ${span(step_s)}` : "");
    set(piece, "--grow", part.toFixed(4));
    bar.append(piece);
    legend.append(make("span", `${text} `, make("b", span(step_s))));
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", legend.textContent);
  return [make("h3", "Where the time went", make("span.soft.small", `${span(seconds)} in all`)), bar, legend];
}

async function takeImage(file) {
  if (!file) return;
  const reader = new FileReader();
  reader.onload = () => tryIt({ image: reader.result }, file.name);
  reader.readAsDataURL(file);
}

/* ---- Controls ---- */

const field = byId("text");
byId("form").onsubmit = event => { event.preventDefault(); tryIt(field.value); };
field.onkeydown = event => { if ((event.ctrlKey || event.metaKey) && event.key === "Enter") byId("form").requestSubmit(); };
byId("file").onchange = event => { takeImage(event.target.files[0]); event.target.value = ""; };
for (const kind of ["dragover", "dragleave", "drop"]) {
  field.addEventListener(kind, event => {
    if (byId("choose").hidden) return;
    event.preventDefault();
    field.classList.toggle("over", kind === "dragover");
    if (kind === "drop") takeImage(event.dataTransfer.files[0]);
  });
}
byId("curl").onclick = async () => {
  const [path, body] = requestFor(field.value), data = JSON.stringify(body).replaceAll("'", "'\\''");
  const key = keyField.value ? " -H 'authorization: Bearer YOUR_KEY'" : "";
  await navigator.clipboard.writeText(`curl -s ${new URL(path, root)} -H 'content-type: application/json'${key} -d '${data}'`);
  put(byId("curl"), "Copied");
  setTimeout(() => put(byId("curl"), "Copy as curl"), 1500);
};
byId("model").onchange = () => { offerTry(); if (newest) show(newest); };
byId("pause").onclick = () => {
  paused = !paused;
  byId("pause").setAttribute("aria-pressed", paused);
  put(byId("pause"), paused ? "Go on" : "Pause");
  document.body.classList.toggle("still", paused);
};
byId("numbers").ontoggle = () => { if (newest && chosen()) showTable(minutes.get(chosen()).at(-1).view); };

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  put(byId("theme"), theme === "dark" ? "Light" : "Dark");
  readColours();
}
const darkness = matchMedia("(prefers-color-scheme: dark)");
darkness.onchange = () => setTheme(darkness.matches ? "dark" : "light");
byId("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
setTheme(darkness.matches ? "dark" : "light");

const still = matchMedia("(prefers-reduced-motion: reduce)");
setInterval(() => { if (newest && !paused && !still.matches && document.visibilityState === "visible") drawLanes(); }, 50);
document.onvisibilitychange = follow;
keyField.onchange = follow;
follow();
