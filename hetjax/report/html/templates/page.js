// Timelines that can be zoomed; without this they show the whole step.
for (const figure of document.querySelectorAll(".timeline")) {
  const end = Number(figure.dataset.end), plot = figure.querySelector(".plot");
  const svg = plot.querySelector("svg"), height = svg.viewBox.baseVal.height;
  const [over, axis, tip] = [".over", ".axis", ".tip"].map(s => figure.querySelector(s));
  const bars = [...svg.querySelectorAll("g rect")].map(rect => ({
    rect, x: Number(rect.getAttribute("x")), width: Number(rect.getAttribute("width")),
    y: Number(rect.getAttribute("y")), height: Number(rect.getAttribute("height")),
  }));
  const widths = bars.map(bar => bar.width).sort((a, b) => a - b);
  const typical = widths[widths.length >> 1] || end;
  let from = 0, to = end, waiting = 0;

  const unit = end < 1 ? ["µs", 1e3] : end < 1e4 ? ["ms", 1] : ["s", 1e-3];
  const told = (ms, digits) => `${(ms * unit[1]).toFixed(digits)} ${unit[0]}`;
  const left = ms => `${100 * (ms - from) / (to - from)}%`;

  function write(parent, words, place) {
    const span = parent.appendChild(document.createElement("span"));
    span.textContent = words;
    Object.assign(span.style, place);
  }

  function draw(paper) {
    waiting = 0;
    svg.setAttribute("viewBox", `${from} 0 ${to - from} ${height}`);
    const perMs = (paper ? 500 : plot.clientWidth) / (to - from); // pixels
    svg.classList.toggle("edged", typical * perMs > 5);
    axis.replaceChildren();
    const rough = 90 / perMs, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map(n => n * power).find(n => n >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step * unit[1]) + 1e-9));
    for (let at = Math.ceil(from / step) * step; at < to - 60 / perMs; at += step)
      write(axis, told(at, digits), { left: left(at) });
    over.replaceChildren();
    const numbered = bars.filter(bar => bar.rect.dataset.m !== undefined &&
      bar.x < to && bar.x + bar.width > from && bar.width * perMs > 15);
    for (const bar of numbered.slice(0, 600))
      for (let device = 0; device < Math.round(bar.height); device++)
        write(over, bar.rect.dataset.m, {
          left: left((Math.max(bar.x, from) + Math.min(bar.x + bar.width, to)) / 2),
          top: `${100 * (bar.y + device + 0.5) / height}%`,
        });
  }

  function show(start, width) {
    width = Math.min(end, Math.max(width, end / 5000));
    from = Math.min(Math.max(start, 0), end - width);
    to = from + width;
    waiting ||= requestAnimationFrame(() => draw());
  }

  function zoom(factor, share = 0.5) {
    const at = from + share * (to - from), width = Math.min(end, (to - from) * factor);
    show(at - share * width, width);
  }

  const share = event => {
    const box = plot.getBoundingClientRect();
    return (event.clientX - box.left) / box.width;
  };
  plot.addEventListener("wheel", event => {
    if (event.deltaY > 0 && to - from >= end) return; // the page may scroll
    event.preventDefault();
    zoom(Math.exp(Math.max(-1, Math.min(1, event.deltaY * 0.002))), share(event));
  }, { passive: false });
  plot.addEventListener("dblclick", () => show(0, end));
  plot.addEventListener("pointerdown", event => {
    const held = share(event), start = from, width = to - from;
    const move = event => show(start - (share(event) - held) * width, width);
    const drop = () => {
      plot.classList.remove("held");
      plot.removeEventListener("pointermove", move);
    };
    plot.classList.add("held");
    plot.setPointerCapture(event.pointerId);
    plot.addEventListener("pointermove", move);
    for (const name of ["pointerup", "pointercancel"])
      plot.addEventListener(name, drop, { once: true });
  });
  plot.addEventListener("keydown", event => {
    const width = to - from;
    const does = {
      ArrowLeft: () => show(from - width / 5, width), ArrowRight: () => show(from + width / 5, width),
      "+": () => zoom(0.5), "-": () => zoom(2), 0: () => show(0, end), Escape: () => show(0, end),
    }[event.key];
    if (!does) return;
    event.preventDefault();
    does();
  });
  for (const button of figure.querySelectorAll("button"))
    button.addEventListener("click", () => zoom(Number(button.dataset.zoom) || Infinity));

  plot.addEventListener("pointermove", event => {
    // a pointer that is held hits the plot: ask what is below it
    const rect = document.elementFromPoint(event.clientX, event.clientY)?.closest("g rect");
    tip.hidden = !rect || plot.classList.contains("held");
    if (tip.hidden) return;
    const times = rect.dataset.s?.split(" ") ?? [rect.getAttribute("x"), rect.getAttribute("width")];
    const [start, length] = times.map(ms => told(Number(ms), 3));
    tip.textContent = `${rect.dataset.t}\n${rect.parentNode.dataset.where}\nfrom ${start}, takes ${length}`;
    const box = figure.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    tip.style.left = `${Math.max(0, Math.min(x + 12, box.width - tip.offsetWidth))}px`;
    tip.style.top = `${y + 16}px`;
  });
  plot.addEventListener("pointerleave", () => { tip.hidden = true; });
  new ResizeObserver(() => show(from, to - from)).observe(plot);
  addEventListener("beforeprint", () => draw(true));
  addEventListener("afterprint", () => draw());
  draw();
}
