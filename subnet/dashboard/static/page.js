// The run as anybody may see it: reads the public status once a second and the metagraph now and then, and draws both.
// Everything a peer wrote is set as text, never as markup.

const STATUS_MS = 1000;
const METAGRAPH_MS = 12000;
const TIMEOUT_MS = 8000;
const PHASES = ["gathering", "training", "committing", "uploading", "merging", "published"];
const SVG = "http://www.w3.org/2000/svg";

const byId = (id) => document.getElementById(id);

// ---- building blocks

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children.filter((child) => child !== null));
  return node;
}

function drawn(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function show(id, ...children) {
  byId(id).replaceChildren(...children);
}

const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));
const percent = (value) => (value === undefined ? "–" : `${(100 * value).toFixed(2)} %`);
const key = (hotkey) => el("span", { class: "key", title: hotkey }, hotkey.slice(0, 8));

function facts(rows) {
  return el("dl", { class: "facts" }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function table(columns, rows) {
  const head = el("tr", {}, ...columns.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  const body = rows.map((cells) => el("tr", {}, ...cells.map((cell, at) => el("td", { class: columns[at][1] }, cell))));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...body));
}

// ---- the parts of the page

function drawNow(run) {
  const now = run.at_s;
  const isOver = run.phase === "finished"; // the state stays as it was at the end of a bounded run
  const length = Math.max(1e-9, run.phase_deadline_s - run.phase_since_s);
  const left = Math.max(0, run.phase_deadline_s - now);
  const phases = PHASES.includes(run.phase) ? PHASES : [...PHASES, run.phase];
  show(
    "now",
    facts([
      ["epoch", String(run.epoch)],
      ["samples done", String(run.num_samples - run.num_open_samples)],
      ["samples open", String(run.num_open_samples)],
      ["training loss now", number(run.recent_loss, 3)],
      ["miners", String(run.miners.filter((miner) => miner.is_live).length)],
      ["validators", String(run.validators.length)],
    ]),
    el(
      "ol",
      { class: "phases", "aria-label": "Phases of an epoch" },
      ...phases.map((phase) => el("li", phase === run.phase ? { "aria-current": "step" } : {}, phase)),
    ),
    el("progress", { max: 1, value: isOver ? 1 : Math.min(1, (now - run.phase_since_s) / length), "aria-label": "time of this phase" }),
    el("p", { class: "quiet" }, phaseEnd(run.phase, Math.ceil(left))),
  );
}

function phaseEnd(phase, left_s) {
  if (phase === "finished") return "the run has ended; this is how it ended";
  const end = phase === "closing" ? "the last audits are judged" : "its quorum is complete";
  return `this phase ends when ${end}, in ${left_s} s at the latest`;
}

function drawLoss(evaluations, kind) {
  byId("dashed").textContent = kind === "blocktrain" ? "the first stage alone" : "with what crosses the cuts set to zero";
  const done = evaluations.filter((one) => one.loss !== null);
  if (done.length === 0) {
    show("loss", el("p", { class: "quiet" }, "No epoch has been measured yet."));
    return;
  }
  const width = Math.max(240, byId("loss").clientWidth); // one unit is one pixel, so that text keeps its size
  const [height, left, bottom, edge] = [200, 44, 22, 10];
  const values = done.flatMap((one) => [one.loss, one.loss_wires_zeroed]).filter((value) => value !== null);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (at) => left + (done.length === 1 ? 0.5 : at / (done.length - 1)) * (width - left - edge);
  const y = (value) => edge + (high === low ? 0.5 : (high - value) / (high - low)) * (height - bottom - 2 * edge);
  const last = done[done.length - 1];
  const picture = drawn("svg", {
    viewBox: `0 0 ${width} ${height}`,
    width,
    height,
    role: "img",
    "aria-label": `held-out loss ${last.loss.toFixed(3)} after epoch ${last.epoch}`,
  });
  for (const value of new Set([low, high])) {
    picture.append(drawn("line", { class: "axis", x1: left, x2: width - edge, y1: y(value), y2: y(value) }));
    picture.append(drawn("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, value.toFixed(2)));
  }
  const line = (name) =>
    done.map((one, at) => (one[name] === null ? null : `${x(at)},${y(one[name])}`)).filter((point) => point !== null).join(" ");
  picture.append(drawn("polyline", { class: "curve zeroed", points: line("loss_wires_zeroed") }));
  picture.append(drawn("polyline", { class: "curve", points: line("loss") }));
  const every = Math.ceil(done.length / 16);
  done.forEach((one, at) => {
    for (const [name, kind] of [["loss_wires_zeroed", "zeroed"], ["loss", ""]]) { // a curve of one point is none
      if (one[name] === null) continue;
      const dot = drawn("circle", { class: kind, cx: x(at), cy: y(one[name]), r: 3 });
      dot.append(drawn("title", {}, `epoch ${one.epoch}: ${one[name].toFixed(4)}`));
      picture.append(dot);
    }
    if (at % every === 0) picture.append(drawn("text", { x: x(at), y: height - 6, "text-anchor": "middle" }, `e${one.epoch}`));
  });
  show("loss", picture, el("p", { class: "quiet" }, `${last.loss.toFixed(3)} after epoch ${last.epoch}`));
}

function minerState(miner, epoch) {
  if (miner.banned_until >= epoch) return ["bad", `banned until epoch ${miner.banned_until}`];
  if (!miner.is_live) return ["care", "silent"];
  if (!miner.is_in_roster) return ["quiet", "next epoch"];
  if (miner.has_uploaded) return ["good", "uploaded"];
  return miner.has_committed ? ["good", "committed"] : ["quiet", "works"];
}

function drawStages(run) {
  const columns = run.stages.map((stage) => {
    const merged = stage.num_shards ? ` merged ${stage.num_accepted} of ${stage.num_shards} shards` : "";
    const miners = run.miners.filter((miner) => miner.stage === stage.stage);
    return el(
      "div",
      { class: "stage" },
      el("h3", {}, `Stage ${stage.stage}`, el("span", { class: "quiet" }, merged)),
      ...miners.map((miner) => {
        const [kind, word] = minerState(miner, run.epoch);
        return el("div", { class: "miner" }, key(miner.hotkey), el("span", {}, `${miner.units} units`), el("span", { class: kind }, word));
      }),
    );
  });
  show("stages", el("div", { class: "stages" }, ...columns));
}

function drawStandings(run, metagraph) {
  const neurons = new Map((metagraph ? metagraph.neurons : []).map((neuron) => [neuron.hotkey, neuron]));
  const earned = new Map(run.standings.map((one) => [one.hotkey, one]));
  const rows = run.miners.map((miner) => {
    const standing = earned.get(miner.hotkey);
    const neuron = neurons.get(miner.hotkey);
    return [
      key(miner.hotkey),
      neuron ? String(neuron.uid) : "–",
      String(miner.stage),
      number(standing && standing.score, 2),
      percent(standing && standing.weight),
      percent(neuron && neuron.incentive),
      number(neuron && neuron.stake, 3),
      number(neuron && neuron.emission, 6),
      el("span", { class: miner.banned_until >= run.epoch ? "bad" : "quiet" }, reason(miner, standing, neuron, metagraph, run)),
    ];
  });
  const columns = [
    ["hotkey", ""], ["uid", "number"], ["stage", "number"], ["score", "number"], ["weight", "number"],
    ["incentive", "number"], ["stake, alpha", "number"], ["emission a tempo", "number"], ["", "reason"],
  ];
  show("standings", rows.length ? table(columns, rows) : el("p", { class: "quiet" }, "No miner has joined yet."));
}

function reason(miner, standing, neuron, metagraph, run) {
  if (miner.banned_until >= run.epoch) return `an audit of its work failed: banned until epoch ${miner.banned_until}`;
  if (metagraph && !neuron) return "not registered on the subnet";
  if (run.standings.length === 0) return "no validator has posted scores yet";
  if (!standing || standing.weight === 0) return "nothing that counts in a published epoch yet";
  return "";
}

function drawAudits(run) {
  const rows = run.audits.map((audit) => {
    const kind = { pass: "good", fail: "bad", inconclusive: "care" }[audit.outcome] || "quiet";
    const word = audit.outcome || (audit.is_answered ? "being replayed" : "evidence asked for");
    return [
      String(audit.epoch), key(audit.hotkey), String(audit.segment), el("span", { class: kind }, word),
      number(audit.rel_d, 4), number(audit.rel_dw, 3),
      audit.published_rule_passes === null ? "–" : audit.published_rule_passes ? "pass" : "fail",
      audit.outcome === "pass" ? "" : audit.reasons.join("; "),
    ];
  });
  const flags = run.flags.map((flag) =>
    el("p", { class: "care" }, "flag, epoch ", String(flag.epoch), ": samples through ", key(flag.hotkey),
      ` differ by ${flag.effect.toFixed(3)} nats a token (z ${flag.z.toFixed(1)}); its audits are certain now`),
  );
  const columns = [
    ["epoch", "number"], ["hotkey", ""], ["segment", "number"], ["verdict", ""], ["distance", "number"], ["of dw", "number"],
    ["published rule", ""], ["why", "reason"],
  ];
  show("audits", rows.length ? table(columns, rows) : el("p", { class: "quiet" }, "None is drawn yet."), ...flags);
}

function drawRecord(run, metagraph) {
  const posted = Object.entries(run.posted).map(([validator, segment]) => `${validator.slice(0, 8)} to segment ${segment}`);
  const chain = metagraph ? `netuid ${metagraph.netuid}, block ${metagraph.at_block}, tempo ${metagraph.tempo}` : "not read yet";
  show(
    "record",
    facts([
      ["events", String(run.num_ledger_entries)],
      ["sealed segments", String(run.sealed_segments)],
      ["head", el("span", { class: "key", title: run.ledger_head }, run.ledger_head.slice(0, 16))],
      ["scored by", posted.join(", ") || "nobody yet"],
      ["who computed other weights", run.dissenting.map((validator) => validator.slice(0, 8)).join(", ") || "nobody"],
      ["chain", chain],
    ]),
  );
}

// ---- the loop

async function read(name) {
  const answer = await fetch(`v1/public/${name}`, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) });
  if (!answer.ok) throw new Error(`HTTP status ${answer.status}`);
  return answer.json();
}

let metagraph = null;
let metagraphAt = -Infinity;
let seenAt = null;

async function look() {
  const run = await read("status");
  if (performance.now() - metagraphAt > METAGRAPH_MS) {
    metagraphAt = performance.now();
    metagraph = await read("metagraph").catch(() => metagraph); // the chain may be down while the run goes on
  }
  byId("run").textContent = run.run_id;
  document.title = `Strata: epoch ${run.epoch}, ${run.phase}`;
  drawNow(run);
  drawLoss(run.evaluations, run.kind);
  drawStages(run);
  drawStandings(run, metagraph);
  drawAudits(run);
  drawRecord(run, metagraph);
  seenAt = new Date();
}

async function forever() {
  for (;;) {
    if (!document.hidden) {
      try {
        await look();
        byId("gone").hidden = true;
      } catch (error) {
        const since = seenAt ? `; this is how things stood at ${seenAt.toLocaleTimeString()}` : "";
        byId("gone").textContent = `The orchestrator does not answer (${error.message})${since}. Trying again.`;
        byId("gone").hidden = false;
      }
    }
    await new Promise((done) => setTimeout(done, STATUS_MS));
  }
}

forever();
