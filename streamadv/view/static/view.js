"use strict";
// Text is only ever set by textContent; HTML comes escaped from the server that sent this file.

// Keys: j and k move, enter opens, u goes up; left and right: batches, pages, tokens.
const rows = () => [...document.querySelectorAll("table.rows tbody tr, article.rows")].filter((row) => row.querySelector("a.open"));
function move(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("current"));
  const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + step))];
  all.forEach((row) => row.classList.toggle("current", row === next));
  next.scrollIntoView({ block: "nearest", inline: "nearest" });
}
function follow(selector) {
  const link = document.querySelector(selector);
  if (link) location.href = link.href;
}
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
  const key = event.key;
  if (tokens && key.startsWith("Arrow") && /Left|Right/.test(key)) tokens.step(key === "ArrowRight" ? 1 : -1);
  else if (key === "j" && tokens) follow(".rollout[aria-current] + .rollout");
  else if (key === "k" && tokens) follow(".rollout:has(+ .rollout[aria-current])");
  else if (key === "j") move(1);
  else if (key === "k") move(-1);
  else if (key === "Enter" && !event.target.closest("a, summary")) follow(".current a.open");
  else if (key === "u") follow("a.up");
  else if (key === "ArrowLeft") follow("a[rel=prev]");
  else if (key === "ArrowRight") follow("a[rel=next]");
  else return;
  event.preventDefault();
});

// The board, live: the browser connects again by itself.
const board = document.querySelector("[data-live]");
if (board) {
  const away = document.getElementById("away");
  const old = (text) => {
    board.classList.toggle("old", text !== "");
    away.hidden = text === "";
    away.textContent = text;
  };
  const source = new EventSource(board.dataset.live);
  let isPressed = false;
  addEventListener("pointerdown", () => { isPressed = true; });
  for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => { setTimeout(() => { isPressed = false; }); });
  source.addEventListener("flow", (event) => {
    old("");
    if (isPressed || !getSelection().isCollapsed) return;  // what is clicked on or copied stays
    const links = () => [...board.querySelectorAll("a")], at = links().indexOf(document.activeElement);
    board.innerHTML = JSON.parse(event.data);
    links()[at]?.focus({ preventScroll: true });
  });
  source.addEventListener("away", (event) => old(JSON.parse(event.data)));
  source.onerror = () => old("this page's server does not answer; it is asked again");
}

// A row of a table opens wherever it is clicked on.
addEventListener("click", (event) => {
  const open = event.target.closest("table.rows tr")?.querySelector("a.open");
  if (open && !event.target.closest("a") && getSelection().isCollapsed) location.href = open.href;
});

const slider = document.querySelector(".slider input[type=range]");
if (slider) {
  slider.addEventListener("input", () => { slider.nextElementSibling.textContent = slider.value; });
  slider.addEventListener("change", () => slider.form.submit());
}

// Tokens: drawn in chunks, and only those near what is visible.
const CHUNK = 256, LONGEST_CHUNK = 512, NEAR = "600px", MOST_BARS = 2000;
class Tokens {
  constructor(place, data) {
    Object.assign(this, { place, kinds: data.kinds, rows: data.rows, at: null });
    this.by = document.getElementById("by");
    this.hover = document.getElementById("hover");
    this.chart = document.getElementById("chart");
    const asked = new URLSearchParams(location.search).get("by");
    for (const name of Object.keys(data.kinds)) this.by.add(new Option(name, name, false, name === asked));
    this.by.onchange = () => {
      const address = new URL(location);
      address.searchParams.set("by", this.by.value);
      history.replaceState(null, "", address);
      this.colour();
    };
    document.getElementById("as-ids").onchange = (event) => {
      this.asIds = event.target.checked;
      place.classList.toggle("ids", this.asIds);
      this.layOut();
    };
    place.addEventListener("mouseover", (event) => event.target.dataset.t && this.show(...event.target.dataset.t.split("-").map(Number)));
    place.addEventListener("click", (event) => {
      if (!event.target.dataset.t) return;
      history.replaceState(null, "", "#t" + event.target.dataset.t);
      this.show(...event.target.dataset.t.split("-").map(Number));
    });
    this.chart.onclick = (event) => this.go(...this.placeOf(Math.floor((event.offsetX / this.chart.clientWidth) * this.total)));
    addEventListener("resize", () => this.draw());
    this.total = this.rows.reduce((sum, row) => sum + row.ids.length, 0);
    this.layOut();
    this.colour();
    const named = /^#t(\d+)-(\d+)$/.exec(location.hash);
    if (named) this.go(Number(named[1]), Number(named[2]));
  }
  layOut() {
    this.watch?.disconnect();
    this.place.replaceChildren();
    this.chunks = [];
    this.watch = new IntersectionObserver((seen) => seen.forEach((entry) => this.fill(entry.target, entry.isIntersecting)), { rootMargin: NEAR });
    this.rows.forEach((row, number) => {
      if (this.rows.length > 1) {
        const title = document.createElement("h2");
        title.textContent = `row ${number}${row.agent ? ` (${row.agent})` : ""}${row.reward === null ? "" : `, reward ${row.reward}`}`;
        this.place.append(title);
      }
      for (let start = 0, stop; start < row.ids.length; start = stop) {
        stop = Math.min(start + CHUNK, row.ids.length);
        const most = Math.min(start + LONGEST_CHUNK, row.ids.length);
        let end = stop;  // a chunk is a block of its own: it ends with a line where there is one
        while (end < most && !row.text[end - 1].endsWith("\n")) end++;
        if (end < most) stop = end;
        const chunk = document.createElement("div");
        chunk.className = "chunk";
        Object.assign(chunk, { row: number, start, stop });
        chunk.style.minHeight = `${Math.ceil((stop - start) / 16) * 1.5}rem`;
        this.place.append(chunk);
        this.chunks.push(chunk);
        this.watch.observe(chunk);
      }
    });
  }
  fill(chunk, isNear) {
    if (isNear === chunk.childNodes.length > 0) return;
    if (!isNear) {
      chunk.style.minHeight = `${chunk.offsetHeight}px`;
      chunk.replaceChildren();
      return;
    }
    const row = this.rows[chunk.row], spans = document.createDocumentFragment();
    for (let token = chunk.start; token < chunk.stop; token++) {
      const span = document.createElement("span");
      const text = row.text[token];
      span.textContent = this.asIds ? row.ids[token] : text;
      span.className = (row.columns.response_mask[token] ? "" : "masked ") + (text || this.asIds ? "" : "part");
      span.dataset.t = `${chunk.row}-${token}`;
      spans.append(span);
    }
    chunk.replaceChildren(spans);
    chunk.style.minHeight = "";
    this.paint(chunk);
  }
  colour() {
    const name = this.by.value, found = [];
    for (const row of this.rows) (row.columns[name] || []).forEach((value, token) => {
      if (value !== null && (row.columns.response_mask[token] || this.kinds[name] === "named")) found.push(value);
    });
    found.sort((a, b) => a - b);
    this.low = found[0] ?? 0;
    this.high = found[found.length - 1] ?? 0;
    this.chunks.forEach((chunk) => this.paint(chunk));
    const legend = document.getElementById("legend");
    legend.replaceChildren();
    const values = this.kinds[name] === "named" ? [...new Set(found)].slice(0, 12) : this.low === this.high ? [this.low] : [this.low, this.high];
    for (const value of values) {
      const item = document.createElement("span");
      item.textContent = value;
      item.style.setProperty("--state", this.colourOf(value) || "transparent");
      legend.append(item);
    }
    this.draw();
  }
  colourOf(value) {
    if (value === null || value === undefined) return "";
    const kind = this.kinds[this.by.value];
    if (kind === "named") return this.by.value === "response_mask" ? (value ? "rgb(40 120 220 / .28)" : "") : value < 0 ? "" : `hsl(${(value * 137.5 + 210) % 360} 70% 55% / .3)`;
    if (kind === "diverging") {
      const most = Math.max(Math.abs(this.low), Math.abs(this.high)) || 1, share = Math.min(1, Math.abs(value) / most);
      return share === 0 ? "" : value > 0 ? `rgb(20 160 100 / ${0.08 + 0.52 * share})` : `rgb(225 60 45 / ${0.08 + 0.52 * share})`;
    }
    const share = this.high > this.low ? Math.max(0, Math.min(1, (this.high - value) / (this.high - this.low))) : 0;
    return `rgb(150 80 210 / ${0.04 + 0.5 * share})`;  // the lower, the darker: improbable tokens stand out
  }
  paint(chunk) {
    const row = this.rows[chunk.row], values = row.columns[this.by.value] || [], named = this.kinds[this.by.value] === "named";
    for (const span of chunk.childNodes) {
      const token = Number(span.dataset.t.split("-")[1]);
      span.style.backgroundColor = named || row.columns.response_mask[token] ? this.colourOf(values[token]) : "";
      span.classList.toggle("at", this.at !== null && this.at[0] === chunk.row && this.at[1] === token);
    }
  }
  draw() {
    const canvas = this.chart, scale = devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const pen = canvas.getContext("2d"), step = Math.max(1, Math.ceil(this.total / MOST_BARS));
    pen.scale(scale, scale);
    const low = Math.min(0, this.low), high = Math.max(0, this.high), span = high - low || 1, zero = height * (high / span);
    let place = 0;
    for (const row of this.rows) for (let token = 0; token < row.ids.length; token++, place++) {
      const value = (row.columns[this.by.value] || [])[token];
      if (place % step || value === null || value === undefined || !row.columns.response_mask[token]) continue;
      pen.fillStyle = value >= 0 ? "rgb(20 150 95)" : "rgb(215 60 45)";
      const y = height * ((high - value) / span);
      pen.fillRect((place / this.total) * width, Math.min(y, zero), Math.max(1, (width * step) / this.total - 0.5), Math.max(1, Math.abs(y - zero)));
    }
    if (this.at) {
      const before = this.rows.slice(0, this.at[0]).reduce((sum, row) => sum + row.ids.length, 0) + this.at[1];
      pen.fillStyle = "rgb(60 130 230)";
      pen.fillRect((before / this.total) * width, 0, 2, height);
    }
  }
  placeOf(place) {
    for (let row = 0; row < this.rows.length; row++) {
      if (place < this.rows[row].ids.length) return [row, place];
      place -= this.rows[row].ids.length;
    }
    return [0, 0];
  }
  show(number, token) {
    const row = this.rows[number];
    this.place.querySelector("span.at")?.classList.remove("at");
    this.at = [number, token];
    this.place.querySelector(`[data-t="${number}-${token}"]`)?.classList.add("at");
    const pairs = [["token", `${token} of ${row.ids.length}`], ["id", row.ids[token]], ["text", JSON.stringify(row.text[token])],
      ...Object.entries(row.columns).map(([name, values]) => [name, values[token]])];
    this.hover.replaceChildren(...pairs.map(([name, value]) => {
      const pair = document.createElement("div"), term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      pair.append(term, text);
      return pair;
    }));
    this.hover.hidden = false;
    this.draw();
  }
  go(number, token) {
    const chunk = this.chunks.find((each) => each.row === number && token < each.stop);
    if (!chunk || token >= this.rows[number].ids.length) return;
    this.fill(chunk, true);
    this.show(number, token);
    chunk.childNodes[token - chunk.start].scrollIntoView({ block: "center" });
  }
  step(by) {
    const [number, token] = this.at || [0, -1];
    const next = Math.max(0, Math.min(this.rows[number].ids.length - 1, token + by));
    this.go(number, next);
  }
}
let tokens = null;
const place = document.getElementById("tokens");
if (place) fetch(place.dataset.columns).then((answer) => (answer.ok ? answer.json() : Promise.reject(new Error(`${answer.status}`))))
  .then((data) => { tokens = new Tokens(place, data); })
  .catch((error) => { place.textContent = `the tokens cannot be read: ${error.message}`; });
