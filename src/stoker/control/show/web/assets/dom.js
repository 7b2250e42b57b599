// Helpers for elements. Texts of runs become text nodes: nothing here parses a string as markup.

export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "text") node.textContent = value;
    else if (name === "value" || name === "checked" || name === "disabled" || name === "hidden") node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(3)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

export function fill(node, ...children) {
  node.replaceChildren(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Scales a canvas to the screen's resolution. Returns its context in CSS pixels, its width and its height.
export function drawable(canvas) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  const across = Math.max(1, Math.round(width * scale)), down = Math.max(1, Math.round(height * scale));
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width, height];
}

export function tip(event, lines) {
  const box = document.getElementById("tip");
  if (!lines) {
    box.hidden = true;
    return;
  }
  fill(box, lines.map((line) => (typeof line === "string" ? el("div", { text: line }) : line)));
  box.hidden = false;
  const gap = 12, width = box.offsetWidth, height = box.offsetHeight;
  let left = event.clientX + gap, top = event.clientY + gap;
  if (left + width > window.innerWidth - 4) left = Math.max(4, event.clientX - gap - width);
  if (top + height > window.innerHeight - 4) top = Math.max(4, event.clientY - gap - height);
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

// Shows a confirmation dialog. Resolves to true or false.
export function confirmed(title, text, action) {
  return new Promise((resolve) => {
    const box = el("dialog", { class: "ask", "aria-labelledby": "ask-title" });
    const done = (answer) => () => {
      box.close();
      box.remove();
      resolve(answer);
    };
    box.append(
      el("h2", { id: "ask-title", text: title }),
      el("p", { text }),
      el(
        "div",
        { class: "buttons" },
        el("button", { type: "button", id: "ask-no", onclick: done(false), text: "Cancel" }),
        el("button", { type: "button", id: "ask-yes", class: "danger", onclick: done(true), text: action }),
      ),
    );
    box.addEventListener("cancel", done(false));
    document.body.append(box);
    box.showModal();
  });
}
