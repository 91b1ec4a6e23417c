-- Take over everything delivered and not acknowledged, oldest first, whoever holds it.
-- Keys: ready stream, group:<id> hash, waiting zset, active zset (read), stats hash, tally hash.
-- ARGV: consumer
-- Returns the group ids. A group whose entry vanished from the stream is put into it again (counted
-- in stats.lost_entries), so that the next claim finds it.
local consumer, stream = ARGV[1], base .. 'ready'
for _, group in ipairs(call('ZRANGE', base .. 'active', 0, -1)) do
  local facts = call('HMGET', key('group', group), 'state', 'entry')
  if (facts[1] == 'ready' or facts[1] == 'claimed')
    and #call('XRANGE', stream, facts[2], facts[2]) == 0 then
    call('HINCRBY', base .. 'stats', 'lost_entries', 1)
    call('XACK', stream, 'feeders', facts[2])
    announce(group)
  end
end
local groups = {}
for _, pending in ipairs(call('XPENDING', stream, 'feeders', '-', '+', 1000000)) do
  local group = take(pending[1])
  if group then
    call('XCLAIM', stream, 'feeders', consumer, 0, pending[1], 'JUSTID')
    groups[#groups + 1] = group
  end
end
return groups
