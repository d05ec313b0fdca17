// Browsers start no worker from a page that was opened as a file, and the search runs in one. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.documentElement.appendChild(frame)
      const inside = frame.contentWindow
      const waiting = []
      this.deliver = data => waiting.push(data)
      inside.document.open()
      inside.document.write("<!DOCTYPE html><title>search</title>")
      inside.document.close()
      // What the worker's code posts goes to whoever listens to this object.
      inside.postMessage = data => {
        const event = new MessageEvent("message", { data })
        if (this.onmessage) this.onmessage(event)
        this.dispatchEvent(event)
      }
      inside.importScripts = () => {}
      const script = inside.document.createElement("script")
      script.src = new URL(url, location.href).href
      script.onload = () => {
        this.deliver = data => inside.dispatchEvent(new inside.MessageEvent("message", { data }))
        waiting.forEach(data => this.deliver(data))
      }
      inside.document.documentElement.appendChild(script)
      this.frame = frame
    }

    postMessage(data) { this.deliver(data) }

    terminate() { this.frame.remove() }
  }
}
