-- append(group_id, packet, stream, name): append a packet to a stream; name: 'rollouts' or 'scoring'. Returns the error
-- STREAMEND if the stream takes no more entries, as after the last possible id, else nil.
-- KEYS  ledger
--   packet  key, bytes, epoch, text (members), table; count: of the members
local function append(group_id, packet, stream, name)
  local id = redis.pcall('XADD', stream, '*', 'group_id', group_id, 'payload', packet.key, 'bytes', packet.bytes,
    'epoch', packet.epoch, 'members', packet.text, 'table', packet.table)
  if id.err then
    if string.find(id.err, 'OOM', 1, true) then error(id) end  -- the first write of a script is refused above maxmemory
    return redis.error_reply('STREAMEND ' .. stream .. ' takes no more entries: ' .. id.err)
  end
  count('pushed', packet.count)
  count(name, packet.count)
  count(name .. '_packets', 1)
  if packet.bytes ~= '0' then
    count('live_bytes', tonumber(packet.bytes))
    note_size(tonumber(packet.bytes), packet.count)
  end
end
