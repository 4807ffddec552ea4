/** The last minute: a bar per sequence, and below what each step computed. All on the engine's clock. */

import { sequenceColour } from "./block_map.js";

export const WINDOW_S = 60;
const LANE = 13;
const LANE_GAP = 3;
const MIN_LANES = 10;
const MAX_LANES = 20;
const BARS_HEIGHT = 76;
const AXIS_HEIGHT = 20;
const LABEL_HEIGHT = 19;

export class Timeline {
  constructor(canvas) {
    this._canvas = canvas;
    this._context = canvas.getContext("2d");
    this._bars = new Map(); // sequence id → { lane, segments: [{ from, to, phase }] }
    this._steps = [];
    this._now = 0;
    new ResizeObserver(() => this.draw()).observe(canvas.parentElement);
    addEventListener("themechange", () => this.draw());
  }

  /** A new engine has another clock. */
  clear() {
    this._bars.clear();
    this._steps = [];
  }

  /** steps: those newer than any before, oldest first; each { endedS, stepS, numPrefillTokens, numDecodes }. */
  update(nowS, sequences, steps) {
    this._now = nowS;
    this._steps.push(...steps);
    this._steps.splice(0, this._steps.findIndex((step) => step.endedS >= nowS - WINDOW_S - 1));
    for (const [id, bar] of this._bars) if (bar.segments.at(-1).to < nowS - WINDOW_S) this._bars.delete(id);
    for (const { id, phase } of sequences) this._extend(id, phase, nowS);
    this.draw();
  }

  _extend(id, phase, nowS) {
    let bar = this._bars.get(id);
    if (!bar) {
      const taken = new Set([...this._bars.values()].filter((other) => other.segments.at(-1).to > nowS - 1.5).map((other) => other.lane));
      let lane = 0;
      while (taken.has(lane)) lane++;
      bar = { lane, segments: [] };
      this._bars.set(id, bar);
    }
    const last = bar.segments.at(-1);
    if (last && nowS - last.to < 2) {
      last.to = nowS;
      if (last.phase === phase) return;
    }
    bar.segments.push({ from: nowS, to: nowS, phase });
  }

  draw() {
    const canvas = this._canvas;
    const context = this._context;
    const width = canvas.parentElement.clientWidth;
    if (width <= 0) return;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const isDark = document.documentElement.dataset.theme === "dark";
    const numLanes = Math.min(MAX_LANES, Math.max(MIN_LANES, ...[...this._bars.values()].map((bar) => bar.lane + 1)));
    const lanesHeight = numLanes * (LANE + LANE_GAP);
    const height = lanesHeight + 2 * (LABEL_HEIGHT + BARS_HEIGHT) + AXIS_HEIGHT + 6;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.style.height = `${height}px`;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const xOf = (timeS) => width - (this._now - timeS) / WINDOW_S * width;
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;

    context.fillStyle = colour("line");
    for (let ago = 0; ago <= WINDOW_S; ago += 10) {
      context.globalAlpha = 0.7;
      context.fillRect(Math.round(xOf(this._now - ago)) - (ago === 0 ? 1 : 0), 0, 1, height - AXIS_HEIGHT);
    }
    context.globalAlpha = 1;
    for (const [id, bar] of this._bars) {
      if (bar.lane < numLanes) this._drawBar(bar, sequenceColour(id, isDark), xOf, colour("control-line"));
    }

    let top = lanesHeight + 4;
    top = this._drawSeries(top, (step) => step.numDecodes, colour("decode"), "Sequences that write a token in a step", colour("muted"), xOf, width);
    top = this._drawSeries(top, (step) => step.numPrefillTokens, colour("prefill"), "Prompt tokens that a step reads", colour("muted"), xOf, width);

    context.fillStyle = colour("muted");
    context.textBaseline = "middle";
    for (let ago = 0; ago <= WINDOW_S; ago += width < 500 ? 20 : 10) {
      context.textAlign = ago === 0 ? "end" : ago === WINDOW_S ? "start" : "center";
      context.fillText(ago === 0 ? "now" : `${ago} s ago`, xOf(this._now - ago), height - AXIS_HEIGHT / 2);
    }
    this._canvas.ariaLabel = `${this._bars.size} sequences and ${this._steps.length} steps in the last minute`;
  }

  _drawBar({ lane, segments }, colour, xOf, outline) {
    const context = this._context;
    const y = lane * (LANE + LANE_GAP);
    for (const { from, to, phase } of segments) {
      const x = Math.max(0, xOf(from));
      const width = Math.max(2, xOf(to) - x);
      if (x + width <= 0) continue;
      if (phase === "waiting") {
        context.strokeStyle = outline;
        context.lineWidth = 1;
        context.strokeRect(x + 0.5, y + 0.5, Math.max(1, width - 1), LANE - 1);
        continue;
      }
      context.fillStyle = colour;
      context.globalAlpha = phase === "prefill" ? 0.45 : 1;
      context.beginPath();
      context.roundRect(x, y, width, LANE, 3);
      context.fill();
      context.globalAlpha = 1;
      if (phase === "prefill") {
        context.save();
        context.clip();
        context.strokeStyle = colour;
        context.lineWidth = 2;
        context.beginPath();
        for (let at = x - LANE; at < x + width; at += 6) {
          context.moveTo(at, y + LANE);
          context.lineTo(at + LANE, y);
        }
        context.stroke();
        context.restore();
      }
    }
  }

  /** What each step did, as tall as it was much and as wide as it took, under a line of text. Returns where the next
   * thing may begin. */
  _drawSeries(top, valueOf, colour, label, muted, xOf, width) {
    const context = this._context;
    const most = this._steps.reduce((found, step) => Math.max(found, valueOf(step)), 1);
    context.fillStyle = muted;
    context.textBaseline = "middle";
    context.textAlign = "start";
    context.fillText(label, 0, top + LABEL_HEIGHT / 2 + 1);
    context.textAlign = "end";
    context.fillText(`at most ${Math.round(most).toLocaleString("en")}`, width, top + LABEL_HEIGHT / 2 + 1);
    context.fillStyle = colour;
    const bottom = top + LABEL_HEIGHT + BARS_HEIGHT;
    for (const step of this._steps) {
      const value = valueOf(step);
      if (value <= 0) continue;
      const tall = Math.max(1.5, value / most * (BARS_HEIGHT - 6));
      const right = xOf(step.endedS);
      const wide = xOf(step.endedS) - xOf(step.endedS - step.stepS);
      context.fillRect(right - wide, bottom - tall, Math.max(1, wide > 4 ? wide - 1 : wide), tall);
    }
    context.globalAlpha = 0.5;
    context.fillRect(0, bottom, width, 1);
    context.globalAlpha = 1;
    return bottom;
  }
}

/** A small line of a figure's last minute, drawn into a tile. */
export function drawSpark(canvas, values) {
  const context = canvas.getContext("2d");
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width) return;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  const most = Math.max(...values, 1e-9);
  const xOf = (index) => width - (values.length - 1 - index) / 239 * width;
  const yOf = (value) => height - 1.5 - value / most * (height - 4);
  const accent = getComputedStyle(document.documentElement).getPropertyValue("--accent").trim();
  context.beginPath();
  values.forEach((value, index) => context.lineTo(xOf(index), yOf(value)));
  context.strokeStyle = accent;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(width, height);
  context.lineTo(xOf(0), height);
  context.globalAlpha = 0.12;
  context.fillStyle = accent;
  context.fill();
}
